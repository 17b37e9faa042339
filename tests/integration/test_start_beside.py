"""`etude start` beside a scheduler that takes the run up, or refuses it, and beside none; and in another run's place."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from etude import start
from etude.demo import prepare
from shared import objects as stores
from shared.contracts import topics as t
from shared.contracts.ids import open_evaluation
from shared.contracts.messages import EvalRequested
from shared.contracts.run import Ref
from shared.settings import ServiceSettings
from tests.end_to_end.problems import write
from tests.unit.etude.test_run_commands import A, Folder, folder


@pytest.fixture
def typed(tmp_path: Path) -> Callable[..., Awaitable[tuple[int, str]]]:
    """`etude start` with problems of one's own: its exit code, and what it said."""
    problems = tmp_path / "mine.jsonl"
    write(problems)

    async def start_(here: Folder, *words: str) -> tuple[int, str]:
        done = await here.etude("start", "--problems", str(problems), *words)
        return done.exit_code, done.output

    return start_


def test_a_run_is_started_when_the_scheduler_has_taken_it_up_and_in_the_place_of_another_that_is_told_to_stop(
    tmp_path, typed
):
    async def story() -> None:
        async with folder(tmp_path / "state") as here:
            await here.start(A)
            assert (await typed(here))[0] == 1
            code, said = await typed(here, "--replace")
            assert (code, f"{A} is told to stop." in said) == (0, True), said
            (new,) = re.findall(r"Run (r-\S+) is started\. `etude runs` says how it stands\.", said)
            (word,) = await here.said()
            assert (word.action, word.reason) == ("stop", f"{new} is started instead")
            rows = json.loads((await here.etude("runs", "--json")).stdout)
            assert [(row["run"], row["state"]) for row in rows] == [(new, "running"), (A, "finished")]

    asyncio.run(story())


def test_a_run_is_started_beside_another_that_goes_on_and_what_it_needs_is_said(tmp_path, typed):
    async def story() -> None:
        async with folder(tmp_path / "state") as here:
            await here.start(A)
            assert (await typed(here, "--beside", "--replace"))[0] == 2
            code, said = await typed(here, "--beside")
            assert (code, "told to stop" in said) == (0, False), said
            (new,) = re.findall(r"Run (r-\S+) is started\.", said)
            assert f"`ETUDE_TRAINER_RUN={new} python -m services.trainer`" in " ".join(said.split())
            rows = json.loads((await here.etude("runs", "--json")).stdout)
            assert [(row["run"], row["state"], row["left_for"]) for row in rows] == [
                (new, "running", ""),
                (A, "running", ""),
            ]
            assert (await here.etude("stop", A)).exit_code == 0
            code, said = await typed(here)  # the other has a trainer of its own
            assert code == 0, said

    asyncio.run(story())


def test_a_measurement_that_is_open_is_named_and_what_becomes_of_it(tmp_path, typed):
    async def story() -> None:
        async with folder(tmp_path / "state") as here:
            objects = stores.connect(ServiceSettings(state=here.state).objects_url)
            nothing = Ref(key="k", size=0, checksum="0" * 32)
            asked = EvalRequested(run=A, eval="version-27-400x8", serial=27, pack=nothing, pack_hidden=nothing)
            objects.put(open_evaluation(A, asked.eval), msgspec.json.encode(asked))
            objects.put(open_evaluation(A, "damaged"), b"no request")
            code, said = await typed(here)
            said = " ".join(said.split())
            assert (code, said.count("The measurement")) == (0, 1), said
            assert f"The measurement version-27-400x8 of {A} is open, and the engines leave version 27" in said
            assert "ETUDE_POOL=evaluation python -m services.inference" in said
            assert "without one it ends without a verdict" in said

    asyncio.run(story())


def test_a_run_that_is_started_paused_stays_so_until_it_is_resumed(tmp_path, typed):
    async def story() -> None:
        async with folder(tmp_path / "state") as here:
            code, said = await typed(here, "--paused")
            assert (code, "is started and paused. `etude measure`" in said) == (0, True), said
            (row,) = json.loads((await here.etude("runs", "--json")).stdout)
            assert (row["state"], row["reason"]) == ("paused", "started with --paused")
            assert (await here.etude("resume")).exit_code == 0
            (row,) = json.loads((await here.etude("runs", "--json")).stdout)
            assert row["state"] == "running"

    asyncio.run(story())


def test_a_run_that_the_scheduler_refuses_is_said_to_have_ended_with_the_reason(tmp_path, typed, monkeypatch):
    changes = tmp_path / "changes.json"
    changes.write_text('{"schedule": {"group_min": 1}}')

    async def story() -> None:
        async with folder(tmp_path / "state") as here:
            code, said = await typed(here, "--config", str(changes))
            assert (code, "no run can be of this: schedule.group_min: found 1; allowed: 2 to" in said) == (1, True), (
                said
            )
            listed = (await here.etude("runs", "--json")).stdout.splitlines()
            assert json.loads(listed[-1]) == []  # above it may stand what the scheduler in this process logs
            # One of another release may refuse what this command lets pass.
            monkeypatch.setattr(prepare, "schedulable", SimpleNamespace(objections=lambda _: []))
            code, said = await typed(here, "--config", str(changes))
            assert (code, "has ended at once: schedule.group_min: found 1; allowed: 2 to" in said) == (1, True), said

    asyncio.run(story())


def test_without_a_scheduler_the_run_is_said_to_wait_for_one(tmp_path, typed, monkeypatch):
    monkeypatch.setattr(start, "TAKEN_WITHIN_S", 0.5)

    async def story() -> None:
        async with folder(tmp_path / "state", scheduler=False) as here:
            code, said = await typed(here)
            assert (code, "no scheduler has taken it up within" in said) == (1, True), said
            first = await anext(aiter(here.bus.deliveries([t.RUNS_COMMANDS], None, 1)))
            assert (first.message.action, first.message.run in said) == ("start", True)

    asyncio.run(story())
