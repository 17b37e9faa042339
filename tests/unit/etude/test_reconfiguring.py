"""`etude reconfigure`: typed beside a real scheduler; and which changes a run can take."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from etude.reconfiguring import objection
from etude.standing import Listener
from shared import objects as stores
from shared.contracts.reconfiguring import FREE, differing
from shared.contracts.run import RunConfig, TrainConfig
from shared.settings import ServiceSettings
from tests.unit.etude.test_run_commands import A, Folder, folder
from tests.unit.scheduler.world import config


def to_file(folder: Path, changes: dict[str, Any]) -> str:
    path = folder / "more.json"
    path.write_text(json.dumps(changes))
    return str(path)


async def holding(here: Folder) -> RunConfig:
    """The configuration that the scheduler says holds."""
    async with Listener(here.bus) as listener:
        ref = listener.standings.of(A).configs[-1]
    return msgspec.json.decode(stores.connect(ServiceSettings(state=here.state).objects_url).get(ref), type=RunConfig)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.acting.ANSWER_WITHIN_S", 0.5)


def test_a_run_takes_another_quota_and_then_a_reason_to_pause_and_the_command_says_what_differs(
    tmp_path: Path, platform_stores: None
) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            await here.etude("pause", "--no-drain", "--reason", "tea")
            done = await here.etude("reconfigure", "--config", to_file(tmp_path, {"schedule": {"quota_gb": 80}}))
            assert done.exit_code == 0, done.output
            assert f"{A} is paused, and goes on with schedule.quota_gb 0.0 -> 80.0." in done.stdout
            (row,) = json.loads((await here.etude("runs", "--json")).stdout)
            assert (row["state"], row["reason"]) == ("paused", "tea")
            assert row["by"].endswith(", etude pause")
            more = to_file(tmp_path, {"schedule": {"pause_on": ["fewer_solved"]}})
            done = await here.etude("reconfigure", A, "--config", more, "--reason", "more")
            assert done.exit_code == 0, done.output
            now = await holding(here)
            assert (now.schedule.quota_gb, now.schedule.pause_on) == (80.0, ["fewer_solved"])
            words = [(w.action, w.reason) for w in await here.said()]
            assert words == [("pause", "tea"), ("reconfigure", ""), ("reconfigure", "more")]

    asyncio.run(story())


def test_what_the_scheduler_cannot_schedule_leaves_the_run_as_it_was_and_the_next_change_builds_on_that(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            for changes, text in (
                ({"quota_gb": -1}, "schedule.quota_gb: found -1.0; allowed: 0 (no quota) or more"),
                ({"group_min": 99}, "schedule.group_min: found 99; allowed: 2 to group_size"),
            ):
                bad = await here.etude("reconfigure", "--config", to_file(tmp_path, {"schedule": changes}))
                assert (bad.exit_code, f"{A} goes on as it was." in bad.stderr, text in bad.stderr) == (1, True, True)
            good = await here.etude("reconfigure", "--config", to_file(tmp_path, {"schedule": {"keep_versions": 7}}))
            assert good.exit_code == 0, good.output
            assert (await holding(here)).schedule.quota_gb == 0.0
            (row,) = json.loads((await here.etude("runs", "--json")).stdout)
            assert row["state"] == "running"

    asyncio.run(story())


def test_what_is_no_change_or_no_file_or_no_run_that_goes_on_is_refused_and_nothing_is_said(tmp_path: Path) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            for changes, text in (
                ({"schedule": {"quota_gb": 0}}, "nothing of it differs from what the run has"),
                ({"train": {"learning_rate": 1e-3}}, "train.learning_rate is fixed for the life of a run; what may"),
                ({"reward": {"solved": 2.0}}, "reward.solved: another reward in mid-run wants a reward.id of its own"),
                ({"schedule": {"quota": 1}}, "found 'schedule.quota'; allowed: "),
                ({"schedule": {"quota_gb": "much"}}, "schedule.quota_gb: found 'much'; allowed: a number"),
            ):
                done = await here.etude("reconfigure", "--config", to_file(tmp_path, changes))
                assert (done.exit_code, text in done.stderr) == (1, True), done.output
            missing = await here.etude("reconfigure", "--config", str(tmp_path / "none.json"))
            assert (missing.exit_code, "none.json" in missing.stderr) == (1, True)
            assert await here.said() == []
            await here.etude("stop")
            over = await here.etude("reconfigure", A, "--config", to_file(tmp_path, {"schedule": {"quota_gb": 1}}))
            assert (over.exit_code, f"{A} is finished. " in over.stderr) == (1, True), over.output

    asyncio.run(story())


def test_without_an_answer_it_says_that_the_word_stands(tmp_path: Path, impatient: None) -> None:
    async def story() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await here.start(A)
            done = await here.etude("reconfigure", "--config", to_file(tmp_path, {"schedule": {"quota_gb": 1}}))
            assert done.exit_code == 1
            assert f"reconfigure is said to {A}, and no scheduler has answered within" in done.stderr
            assert [w.action for w in await here.said()] == ["reconfigure"]

    asyncio.run(story())


def test_a_budget_that_the_learning_rates_fall_with_stays() -> None:
    old = msgspec.structs.replace(config(), train=TrainConfig(cooldown=0.3))
    endless, short, long = (
        msgspec.structs.replace(old, schedule=msgspec.structs.replace(old.schedule, minutes=m, max_steps=0))
        for m in (0.0, 5.0, 99.0)
    )
    assert differing(short, long) == ["schedule.minutes"]
    assert objection(short, long).startswith("schedule.minutes: train.cooldown is 0.3")
    assert objection(endless, long) == ""


def test_what_may_change_are_fields_of_a_run() -> None:
    for name in FREE:
        section, field = name.split(".")
        assert hasattr(getattr(config(), section), field)
