"""`--config FILE`: fields that differ, and nothing that no run knows."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.demo import DemoOptions, changes
from etude.demo.prepare import planned
from shared.contracts.run import Ref, RunConfig

REF = Ref(key="k", size=1, checksum="0" * 32)
CONFIG = RunConfig(run="r", base=REF, pack=REF, pack_hidden=REF)


def changed(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "mine.json"
    path.write_text(text)
    return changes.apply(CONFIG, changes.read(path), path)


def test_named_fields_differ_and_all_others_stay(tmp_path: Path) -> None:
    config = changed(
        tmp_path, json.dumps({"train": {"learning_rate": 2e-5}, "reward": {"behaviour": {"no_submit": 0.0}}})
    )
    assert config.train.learning_rate == 2e-5
    assert config.reward.behaviour == {"broken_tool_call": -0.05, "no_submit": 0.0}
    assert (config.train.credit, config.schedule, config.sampling) == (
        CONFIG.train.credit,
        CONFIG.schedule,
        CONFIG.sampling,
    )


def test_a_term_can_be_switched_off_and_another_one_added(tmp_path: Path) -> None:
    config = changed(tmp_path, json.dumps({"reward": {"length": None, "behaviour": {"todo_unfinished": -0.1}}}))
    assert config.reward.length is None
    assert config.reward.behaviour["todo_unfinished"] == -0.1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"train": {"learning_rat": 1}}', "'train.learning_rat'; allowed: .*learning_rate"),
        ('{"train": {"learning_rate": "fast"}}', "learning_rate"),
        ('{"run": "mine"}', "'run'; allowed: sampling, reward, schedule, train"),
        ('{"train": 3}', "train"),
        ('{"reward": {"behaviour": {"kindness": 1}}}', "'reward.behaviour.kindness'; allowed: broken_tool_call"),
        ('{"schedule": {"minutes": Infinity}}', "schedule.minutes: found Infinity; allowed: a finite number"),
        ('{"train": {"betas": [0.9, NaN]}}', "train.betas: found NaN; allowed: a finite number"),
        ("NaN", "mine.json: found NaN; allowed: a finite number"),
        ('{"schedule": {"minutes": 1e999}}', "schedule.minutes: found 1e999; allowed: a finite number"),
        ("[]", "found list"),
        ("{", "mine.json"),
    ],
)
def test_what_no_run_knows_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(changes.BadChange, match=told):
        changed(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(changes.BadChange, match=r"no\.json"):
        changes.read(tmp_path / "no.json")


def test_a_new_run_pauses_by_itself_where_its_training_is_broken(tmp_path: Path) -> None:
    """`etude start` and `etude demo` begin with the same configuration; what a person names takes its place."""
    assert planned("r", DemoOptions()).schedule.pause_on == ["gradient_not_finite", "age_bound_breached"]
    mine = tmp_path / "mine.json"
    mine.write_text('{"schedule": {"pause_on": []}}')
    assert planned("r", DemoOptions(config=mine)).schedule.pause_on == []


def test_a_stored_run_that_does_not_say_at_what_it_pauses_pauses_at_nothing() -> None:
    stored = msgspec.to_builtins(CONFIG)
    del stored["schedule"]["pause_on"]
    assert msgspec.convert(stored, RunConfig).schedule.pause_on == []


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ({"router_replay": False}, "train.router_replay", False),
        ({"length_penalty": False}, "reward.length", None),
        ({"uniform_sampling": True}, "schedule.hardness_sampling", False),
        ({"staleness": 0}, "schedule.max_staleness", 0),
        ({"credit": "attempt"}, "train.credit.per", "attempt"),
        ({"retry": "append"}, "sampling.retry", "append"),
        ({"seed": 7}, "seed", 7),
    ],
)
def test_an_ablation_is_one_flag_and_the_run_is_of_it(flag: dict[str, Any], field: str, value: object) -> None:
    of = attrgetter(field)
    assert of(planned("r", DemoOptions(**flag))) == value != of(planned("r", DemoOptions()))


def test_a_reward_term_that_is_named_twice_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    path.write_text('{"reward": {"behaviour": {"style": -0.1, "style": 0.1}}}')
    with pytest.raises(changes.BadChange, match="'style' is named twice"):
        changes.read(path)
