"""Impossible values of `--config` are refused before anything starts, with field, value and what is allowed."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from etude import commands
from etude.demo import DemoOptions, changes
from etude.demo.prepare import DemoError, planned
from services.reward.monitors import _BOUNDS
from services.scheduler.quota import QUOTA_EXCEEDED
from shared.contracts import schedulable
from shared.contracts.run import (
    ALERT_NAMES,
    LengthPenalty,
    Ref,
    RewardConfig,
    RunConfig,
    Sampling,
    ScheduleConfig,
    TrainConfig,
)

ROOT = Path(__file__).resolve().parents[3]
REF = Ref(key="k", size=1, checksum="0" * 32)
CONFIG = RunConfig(run="r", base=REF, pack=REF, pack_hidden=REF)
SAID = msgspec.structs.replace(CONFIG, reward=RewardConfig(length=LengthPenalty()))


def nested(field: str, value: Any) -> dict[str, Any]:
    for name in reversed(field.split(".")):
        value = {name: value}
    return value


IMPOSSIBLE: list[tuple[str, Any, str]] = [
    ("sampling.temperature", -1, "found -1.0; allowed: more than 0, at most 10"),
    ("sampling.temperature", 0, "found 0.0; allowed: more than 0"),
    ("sampling.temperature", 1e9, "found 1000000000.0; allowed: more than 0, at most 10"),
    ("sampling.retry", "sometimes", "found 'sometimes'; allowed: fresh, append"),
    ("sampling.max_turns", 0, "found 0; allowed: 1 or more"),
    ("sampling.max_turns", 2.5, "found 2.5; allowed: a whole number"),
    ("sampling.max_turns", 10**30, "allowed: 1 or more, at most 9007199254740992"),
    ("sampling.max_edits", 0, "found 0; allowed: 1 or more"),
    ("sampling.max_completion_tokens", 0, "found 0; allowed: 1 or more"),
    ("sampling.max_repeats", -1, "found -1; allowed: 0 or more"),
    ("sampling.summary_trigger_tokens", -1, "found -1; allowed: 0 or more"),
    ("reward.id", "", "found 0 characters; allowed: 1 to 100 characters"),
    ("reward.solved", -1, "found -1.0; allowed: 0 to 1000000"),
    ("reward.behaviour_apply", "some", "found 'some'; allowed: solved, all"),
    ("reward.behaviour.no_submit", "little", "found 'little'; allowed: a number"),
    ("reward.behaviour.no_submit", 1e300, "allowed: -1000000 to 1000000"),
    ("reward.length", 3, "found 3; allowed: an object with weight, k, q"),
    ("reward.length.weight", -0.1, "found -0.1; allowed: 0 to 1000000"),
    ("reward.length.k", -1, "found -1.0; allowed: 0 to"),
    ("reward.length.q", -1, "found -1.0; allowed: 0 to"),
    ("reward.length.unit_tokens", 0, "found 0.0; allowed: more than 0"),
    ("reward.length.per_tool_call", -1, "found -1.0; allowed: 0 to"),
    ("reward.length.per_turn", -1, "found -1.0; allowed: 0 to"),
    ("reward.length.apply", "sometimes", "found 'sometimes'; allowed: solved, all"),
    ("reward.length.token_weights.thoughts", 1, "allowed: thinking, tool_call, tool_output, final"),
    ("reward.length.token_weights.final", -1, "found -1; allowed: 0 to"),
    ("schedule.group_size", 1, "found 1; allowed: 2 to 128"),
    ("schedule.group_min", 9, "found 9; allowed: 2 to group_size (8)"),
    ("schedule.replacements", -1, "found -1; allowed: 0 or more"),
    ("schedule.groups_per_step", 0, "found 0; allowed: 1 to 1024"),
    ("schedule.max_staleness", -1, "found -1; allowed: 0 to 128"),
    ("schedule.lease_s", 0, "found 0.0; allowed: more than 0"),
    ("schedule.minutes", -1, "found -1.0; allowed: 0 (no limit) or more"),
    ("schedule.pause_on", ["fewer_solvd"], "found 'fewer_solvd'; allowed: age_bound_breached"),
    ("schedule.pause_on", "fewer_solved", "found 'fewer_solved'; allowed: a list of strings"),
    ("schedule.hardness_sampling", "no", "found 'no'; allowed: true or false"),
    ("train.learning_rate", -1, "found -1.0; allowed: 0 to 1"),
    ("train.learning_rate", 1000, "found 1000.0; allowed: 0 to 1"),
    ("train.learning_rate", None, "found null; allowed: a number"),
    ("train.last_norm_learning_rate", -1, "found -1.0; allowed: 0 to 1"),
    ("train.mtp_learning_rate", -1, "found -1.0; allowed: 0 to 1"),
    ("train.warmup_steps", -1, "found -1; allowed: 0 or more"),
    ("train.cooldown", 2, "found 2.0; allowed: 0 to 1"),
    ("train.betas", [0.9, 1.0], "found 1.0; allowed: 0 or more, less than 1"),
    ("train.betas", [0.9], "found [0.9]; allowed: a list of 2 numbers"),
    ("train.weight_decay", -1, "found -1.0; allowed: 0 to 100"),
    ("train.clip_norm", 0, "found 0.0; allowed: more than 0"),
    ("train.credit.per", "token", "found 'token'; allowed: attempt, turn"),
    ("train.credit.discount", 2, "found 2.0; allowed: 0 to 1"),
    ("train.credit.faults.rude", 0.1, "allowed: broken, repeated, gave_up, endless"),
    ("train.credit.faults.broken", -1, "found -1; allowed: 0 to"),
    ("train.credit.failed_share", 2, "found 2.0; allowed: 0 to 1"),
    ("train.kl", -1, "found -1.0; allowed: 0 to"),
    ("train.importance_clip", 0, "found 0.0; allowed: more than 0"),
    ("train.importance_floor", 2, "found 2.0; allowed: 0 to 1"),
    ("train.norm_tokens", -1, "found -1.0; allowed: 0 (sampling.max_completion_tokens) or more"),
    ("train.replay_tau", 2, "found 2.0; allowed: 0 to 1"),
    ("train.micro_batch_tokens", 0, "found 0; allowed: 1 or more"),
    ("train.base_every", 0, "found 0; allowed: 1 or more"),
    ("train.checkpoint_every", 0, "found 0; allowed: 1 or more"),
]


@pytest.mark.parametrize(("field", "value", "said"), IMPOSSIBLE, ids=[f"{f}={v}" for f, v, _ in IMPOSSIBLE])
def test_an_impossible_configuration_is_refused_with_field_value_and_what_is_allowed(
    tmp_path: Path, field: str, value: Any, said: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(nested(field, value)))
    with pytest.raises((DemoError, changes.BadChange)) as refused:
        planned("r", DemoOptions(config=path))
    assert field in str(refused.value)
    assert said in str(refused.value)


WITHOUT_BOUNDS = (math.nan, -1e18)  # no number of a run may be either


def leaves(struct: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any]]:
    """Every field that holds no structure itself, with its type."""
    for name, hint in get_type_hints(struct, include_extras=True).items():
        within = [
            part for part in (hint, *get_args(hint)) if isinstance(part, type) and issubclass(part, msgspec.Struct)
        ]
        if within:
            yield from leaves(within[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


CHANGEABLE = [
    leaf
    for name, part in {
        "sampling": Sampling,
        "reward": RewardConfig,
        "schedule": ScheduleConfig,
        "train": TrainConfig,
    }.items()
    for leaf in leaves(part, f"{name}.")
]


@pytest.mark.parametrize(("field", "hint"), CHANGEABLE, ids=[field for field, _ in CHANGEABLE])
def test_no_field_takes_a_number_without_bounds_or_a_name_that_nothing_declares(field: str, hint: Any) -> None:
    """The table above has examples of today's fields; this holds for those to come."""
    base = hint.__origin__ if get_origin(hint) is Annotated else hint
    if get_origin(base) in (list, dict):
        value = ["no_such_name"] if get_origin(base) is list else {"no_such_name": 1}
        with pytest.raises(changes.BadChange, match=rf"{field}.*allowed: "):
            changes.apply(SAID, nested(field, value), Path())
    elif base in (int, float) or get_origin(base) is tuple:
        for number in WITHOUT_BOUNDS:
            value = -(10**18) if base is int else [number, 0.5] if get_origin(base) is tuple else number
            why = schedulable.objections(changes.apply(SAID, nested(field, value), Path()))
            assert [one for one in why if one.startswith(f"{field}: found ") and "; allowed: " in one], field
    elif base is str:
        (why,) = schedulable.objections(changes.apply(SAID, nested(field, "x" * 10_000), Path()))
        assert why.startswith(f"{field}: found 10000 characters; allowed: ")
    else:  # a choice
        with pytest.raises(changes.BadChange, match=rf"{field}: found 'no such thing'; allowed: "):
            changes.apply(SAID, nested(field, "no such thing"), Path())


def test_a_mask_that_would_leave_out_every_token_is_refused() -> None:
    train = TrainConfig(importance_floor=0.5, importance_clip=0.9)
    (why,) = schedulable.objections(msgspec.structs.replace(CONFIG, train=train))
    assert why.startswith("train.importance_clip: found 0.9; allowed: 1 or more beside an importance_floor above 0")


def test_unknown_names_below_a_term_that_was_off_are_refused(tmp_path: Path) -> None:
    off = msgspec.structs.replace(CONFIG, reward=RewardConfig(length=None))
    for slip in ("wieght", "token_weights.thoughts"):
        with pytest.raises(changes.BadChange, match=f"found 'reward.length.{slip}'; allowed: "):
            changes.apply(off, nested(f"reward.length.{slip}", 1), tmp_path)
    assert changes.apply(off, nested("reward.length.weight", 1), tmp_path).reward.length == LengthPenalty(weight=1.0)


def test_every_mistake_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    wrong = {"train": {"kl": "a", "rate": 1}, "sampling": {"retry": 3}}
    with pytest.raises(changes.BadChange) as refused:
        changes.apply(CONFIG, wrong, tmp_path)
    assert len(str(refused.value).splitlines()) == 3


def test_start_refuses_before_it_asks_for_a_platform_and_check_starts_nothing(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    bad.write_text('{"train": {"learning_rate": -1}}')
    good.write_text('{"train": {"learning_rate": 1e-5}}')
    front_door, state = typer.Typer(), tmp_path / "state"
    commands.register(front_door)
    for words in (["start"], ["start", "--check"]):
        done = CliRunner().invoke(front_door, [*words, "--config", str(bad), "--state", str(state)])
        assert (done.exit_code, "train.learning_rate: found -1.0; allowed: 0 to 1" in done.output) == (1, True)
    done = CliRunner().invoke(front_door, ["start", "--check", "--config", str(good), "--state", str(state)])
    assert (done.exit_code, "nothing was started" in done.output, state.exists()) == (0, True, False), done.output


@pytest.mark.parametrize(
    ("options", "files", "words"),
    [
        (["--problems", "none.jsonl"], {}, "none.jsonl"),
        (["--problems", "some.jsonl"], {"some.jsonl": '{"id": 3}\n'}, "line 1: field 'id': found 3"),
        (["--pack", "pack"], {"pack/manifest.json": "{}"}, "held_out.public.jsonl.zst: missing"),
    ],
)
def test_check_reads_the_problems_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], files: dict[str, str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    front_door = typer.Typer()
    commands.register(front_door)
    done = CliRunner().invoke(front_door, ["start", "--check", *options, "--state", "state"])
    assert (done.exit_code, words in done.output, Path("state").exists()) == (1, True, False), done.output


OLD = msgspec.structs.replace(
    CONFIG,
    sampling=Sampling(temperature=-1.0, max_turns=0),
    train=TrainConfig(learning_rate=-1.0),
    schedule=msgspec.structs.replace(CONFIG.schedule, pause_on=["fewer_solvd"]),
)


def test_what_was_stored_or_sent_before_stays_readable() -> None:
    assert msgspec.json.decode(msgspec.json.encode(OLD), type=RunConfig) == OLD
    assert msgspec.json.decode(msgspec.json.encode(OLD.sampling), type=Sampling) == OLD.sampling


def test_an_old_run_with_an_impossible_value_may_still_be_changed_elsewhere() -> None:
    larger = msgspec.structs.replace(OLD, schedule=msgspec.structs.replace(OLD.schedule, quota_gb=5.0))
    assert len(schedulable.objections(OLD)) == 4
    assert schedulable.objections(larger, OLD) == []
    worse = msgspec.structs.replace(OLD, schedule=msgspec.structs.replace(OLD.schedule, quota_gb=-5.0))
    assert schedulable.objections(worse, OLD) == ["schedule.quota_gb: found -5.0; allowed: 0 (no quota) or more"]


@pytest.mark.parametrize(
    "options",
    [
        DemoOptions(),
        DemoOptions(chat=True),
        DemoOptions(retry="append", credit="attempt", staleness=0, length_penalty=False, steps=3),
        DemoOptions(group_size=2, groups_per_step=1, minutes=0.1, uniform_sampling=True, router_replay=False),
    ],
)
def test_what_the_demo_and_the_defaults_set_is_allowed(options: DemoOptions) -> None:
    assert schedulable.objections(planned("r", options)) == []
    assert schedulable.objections(CONFIG) == []


def raised() -> set[str]:
    """Names that services give an alert, and those that another module declares."""
    found = {QUOTA_EXCEEDED}
    for path in (ROOT / "services").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rsplit(".", 1)[-1] in ("alert", "Alert"):
                named = [k.value for k in node.keywords if k.arg == "name"] or node.args[1:2]
                found |= {n.value for n in named if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found | {alert for _, alert, _ in _BOUNDS.values()}


def test_a_run_may_pause_on_every_alert_that_a_service_raises_and_on_no_other() -> None:
    assert raised() == set(ALERT_NAMES)
