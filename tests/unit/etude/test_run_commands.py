"""`etude pause`, `resume`, `stop`, `rollback`, `runs`: typed beside a real scheduler, and where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from etude import acting, commands
from etude.supervisor import Supervisor
from services.scheduler import service
from services.scheduler.config import SchedulerConfig
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests.ruling import status
from tests.unit.scheduler.world import REF, config

A, B = "r-20260101T000000-aaaa", "r-20260101T000100-bbbb"


class Folder:
    """A state directory, and what is typed about it."""

    def __init__(self, state: Path, bus: Bus, scheduler: bool) -> None:
        self.state, self.bus, self.scheduler = state, bus, scheduler
        self.app = typer.Typer()
        commands.register(self.app)

    async def etude(self, *words: str) -> Result:
        environment = {"COLUMNS": "300", "ETUDE_STATE": str(self.state)}
        return await asyncio.to_thread(CliRunner().invoke, self.app, list(words), env=environment)

    async def start(self, *runs: str) -> None:
        objects = stores.connect(ServiceSettings(state=self.state).objects_url)
        for run in runs:
            ref = objects.put(
                f"runs/{run}/config.json", msgspec.json.encode(msgspec.structs.replace(config(), run=run))
            )
            await self.say(t.RUNS_COMMANDS, m.RunCommand(run=run, action="start", config=ref, by="test"))
            if not self.scheduler:
                await self.say(t.RUNS_STATE, status(run, "running", ref))
            async for delivery in self.bus.deliveries([t.RUNS_STATE], None, 8):
                if delivery.message.run == run:
                    break

    async def say(self, topic: t.Topic, message: Any) -> None:
        await self.bus.publish(topic, message.run, message)

    async def publish(self, *steps: int, incarnation: int = 0, first: int = 0) -> None:
        """Versions of A, counted from `first`, each of its step."""
        for serial, step in enumerate(steps, first):
            version = m.PolicyPublished(
                run=A, serial=serial, incarnation=incarnation, step=step, parent=-1, manifest=REF
            )
            await self.say(t.POLICIES_PUBLISHED, version)

    @contextlib.asynccontextmanager
    async def trainer(self, answer: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """One that hears when a run shall go back."""

        async def hear() -> None:
            async for delivery in self.bus.deliveries([t.RUNS_COMMANDS], None, 8):
                if delivery.message.action == "rollback":
                    await answer()
                delivery.done()

        hearing = asyncio.create_task(hear())
        try:
            yield
        finally:
            hearing.cancel()

    async def said(self, run: str = A) -> list[m.RunCommand]:
        """What persons have said to a run so far, but for its start."""
        deliveries, found = self.bus.deliveries([t.RUNS_COMMANDS], None, 1024), []

        async def read() -> None:
            async for delivery in deliveries:
                found.append(delivery.message)
                delivery.done()

        reading = asyncio.create_task(read())
        await deliveries.caught_up()
        reading.cancel()
        return [word for word in found if word.run == run and word.action != "start"]


@contextlib.asynccontextmanager
async def folder(state: Path, *, scheduler: bool = True) -> AsyncIterator[Folder]:
    """A supervisor holds it. With a scheduler or without."""
    settings = SchedulerConfig(state=state, batch_linger_s=0.02)
    bus = buses.connect(settings.bus_url, client="test")
    with Supervisor(state, say=lambda _: None):
        async with asyncio.timeout(240), contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(bus.close)
            if scheduler:
                await stack.enter_async_context(_scheduling(settings))
            yield Folder(state, bus, scheduler)


@contextlib.asynccontextmanager
async def _scheduling(settings: SchedulerConfig) -> AsyncIterator[None]:
    engine, stop = ledger.connect(settings.ledger_url), asyncio.Event()
    ledger.upgrade(engine)
    bus = buses.connect(settings.bus_url, client="scheduler")
    async with Health("scheduler", settings) as health:
        objects = stores.connect(settings.objects_url)
        serving = asyncio.create_task(service.serve(settings, engine, bus, objects, health, stop))
        try:
            yield
        finally:
            stop.set()
            await serving
            await bus.close()
            engine.dispose()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acting, "ANSWER_WITHIN_S", 0.5)


def test_a_run_is_paused_resumed_and_stopped_and_each_command_returns_when_the_scheduler_has_obeyed(
    tmp_path: Path, platform_stores: None
) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            for words, outcome, state in (
                (
                    ["pause", "--reason", "tea  time"],
                    f"{A} is paused: attempts in hand are finished, and what",
                    "paused",
                ),
                (["resume", A], f"{A} is running again.", "running"),
                (["pause", A, "--no-drain"], "the trainer stops after the step in hand", "paused"),
                (["stop"], f"{A} is finished, at step 0.", "finished"),
            ):
                done = await here.etude(*words)
                assert (done.exit_code, outcome in done.stdout) == (0, True), done.output
                (row,) = json.loads((await here.etude("runs", "--json")).stdout)
                assert row["state"] == state
                assert words[0] in row["by"]
            said = await here.said()
            assert [(w.action, w.reason, w.drain) for w in said] == [
                ("pause", "tea time", True), ("resume", "", True), ("pause", "", False), ("stop", "", True),
            ]  # fmt: skip
            assert all(w.by.endswith(f", etude {w.action}") for w in said)

    asyncio.run(story())


def test_what_cannot_be_obeyed_is_refused_with_the_way_out_and_nothing_is_said(tmp_path: Path) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            nothing = await here.etude("pause")
            await here.start(A)
            await here.etude("pause")
            unknown, twice = await here.etude("pause", "r-none"), await here.etude("pause", A)
            await here.start(B)
            several, left = await here.etude("stop"), await here.etude("resume", A)
            await here.etude("stop", A)
            over = await here.etude("resume", A)
            for refused, text in (
                (nothing, "no run was started here: `etude start` begins one"),
                (unknown, f"run 'r-none': not known here; the newest are {A}"),
                (twice, f"{A} is paused: pause does not apply; allowed: resume, rollback, stop"),
                (several, f"RUN: left out, and 2 runs are not finished; name one of {A} (paused), {B} (running)"),
                (left, f"{A} would get no trainer and no engine: both follow {B}, which was started after it"),
                (over, f"{A} is finished: "),
                (over, f"`etude export {A} --out DIR`, `etude import DIR --name NAME`, `etude start --base NAME`"),
            ):
                assert (refused.exit_code, text in refused.stderr) == (1, True), refused.output
            assert [w.action for w in await here.said()] == ["pause", "stop"]
            assert await here.said(B) == []
            await here.etude("stop", B)
            ended = await here.etude("pause")
            assert "no run goes on here: `etude runs` lists those that have ended" in ended.stderr

    asyncio.run(story())


@pytest.mark.parametrize(
    "words", [["pause"], ["resume"], ["stop"], ["rollback", "--to", "1"], ["start"]], ids=lambda w: w[0]
)
def test_where_nothing_runs_that_is_said_and_no_bus_is_made(tmp_path: Path, words: list[str]) -> None:
    app = typer.Typer()
    commands.register(app)
    done = CliRunner().invoke(app, [*words, "--state", str(tmp_path)], env={"ETUDE_STATE": ""})
    assert done.exit_code == 1
    assert done.stderr == f"nothing runs in {tmp_path}: `etude up --detach --state {tmp_path}` first\n"
    assert not list(tmp_path.iterdir())


def test_a_scheduler_that_does_not_answer_is_said_and_the_word_stands(tmp_path: Path, impatient: None) -> None:
    async def story() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await here.start(A)
            done = await here.etude("pause")
            assert done.exit_code == 1
            assert f"pause is said to {A}, and no scheduler has answered within" in done.stderr
            assert "`etude status` says what the scheduler waits on, `etude logs scheduler` why" in done.stderr
            assert [w.action for w in await here.said()] == ["pause"]

    asyncio.run(story())


def test_a_rollback_returns_when_the_trainer_has_published_the_version_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            await here.publish(0, 1, 2, 3)

            async with here.trainer(lambda: here.publish(2, incarnation=1, first=4)):
                done = await here.etude("rollback", "--to", "2", "--reason", "it fell")
            assert (done.exit_code, f"{A} is running, and goes on from there: version 4." in done.stdout) == (0, True)
            (word,) = await here.said()
            assert (word.action, word.serial, word.reason, len(word.id)) == ("rollback", 2, "it fell", 16)

    asyncio.run(story())


def test_a_rollback_that_the_trainer_refuses_or_does_not_hear_ends_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            await here.publish(0, 1)

            what = "the run does not go back: version 1: gone"
            alert = m.Alert(run=A, name="rollback_refused", severity="critical", what=what)
            async with here.trainer(lambda: here.say(t.ALERTS, alert)):
                refused = await here.etude("rollback", A, "--to", "1")
            monkeypatch.setattr(acting, "BACK_WITHIN_S", 0.5)
            unheard, unpublished = await here.etude("rollback", "--to", "1"), await here.etude("rollback", "--to", "7")
            for done, text in (
                (refused, f"{A}: the run does not go back: version 1: gone"),
                (
                    unheard,
                    "the word stands, and the trainer obeys it when it can. `etude status` says what the trainer",
                ),
                (unpublished, f"--to 7: no version that a step of {A} has published; published: 1 to 1"),
            ):
                assert (done.exit_code, text in done.stderr) == (1, True), done.output
            assert len(await here.said()) == 2

    asyncio.run(story())


def test_runs_are_listed_the_newest_first_with_state_step_and_reason_also_when_nothing_runs_any_more(
    tmp_path: Path,
) -> None:
    async def story() -> Folder:
        async with folder(tmp_path) as here:
            assert f"{tmp_path}: no run was started here." in (await here.etude("runs")).stdout
            await here.start(A, B)
            await here.publish(0, 1, 2)
            await here.etude("pause", A, "--reason", "[bold] tea")
            listed = (await here.etude("runs")).stdout
            assert "Nothing runs" not in listed
            first, second = listed.splitlines()[1:3]
            assert first.split()[:2] == [B, "running"]
            assert second.split()[:2] == [A, "paused"]
            assert second.split()[4:6] == ["2", "2"]
            assert "[bold] tea" in second
            assert f"its trainer left for {B}, which was started after it" in second
            return here

    here = asyncio.run(story())
    listed = asyncio.run(here.etude("runs"))
    assert listed.exit_code == 0
    assert f"Nothing runs in {tmp_path}: `etude up` goes on with what is not finished." in listed.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("runs", 0, "no run was started here. `etude start --state"),
        ("runs --json", 0, "[]"),
        (f"runs --history {A}", 1, f"run '{A}': not known here; none was started"),
        ("measure --best", 1, "no run was started here: `etude start` begins one"),
        ("rollback --to best", 1, "no run was started here: `etude start` begins one"),
        ("promote", 0, "Nothing is promoted."),
        (f"export {A} --out policy", 1, "nor a run of this object store, nor an imported checkpoint of it"),
        ("import nowhere", 1, "nowhere: no config.json"),
        ("status", 0, "nothing is running here"),
        ("dlq list", 0, "No dead letters."),
        ("dlq show alerts", 0, "alerts: no dead letter."),
        ("dlq replay alerts", 0, "alerts: 0 put back."),
    ],
)
def test_who_looks_into_a_folder_in_which_nothing_was_finds_nothing_and_leaves_nothing(
    words: str, code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that holds a bus or objects is a platform's, in which `etude demo` would begin nothing."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    commands.register(app)
    done = CliRunner().invoke(app, [*words.split(), "--state", "new"], env={"ETUDE_STATE": "", "COLUMNS": "300"})
    assert (done.exit_code, said in done.output) == (code, True), done.output
    assert not list(tmp_path.iterdir())


def test_no_run_is_started_beside_one_that_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with folder(tmp_path, scheduler=False) as here:
            await here.start(A)
            beside_running = await here.etude("start")
            await here.say(t.RUNS_STATE, status(A, "stopping"))
            beside_stopping = await here.etude("start")
            for done, text in (
                (
                    beside_running,
                    f"{A} is running; it would get no trainer and no engine any more: `etude stop {A}` first",
                ),
                (beside_stopping, f"{A} is stopping; it would get no trainer and no engine any more: wait for its end"),
                (beside_stopping, "or --replace or --beside (`etude start --help`)"),
            ):
                assert (done.exit_code, text in done.stderr) == (1, True), done.output
            assert not (tmp_path / "own-pack").exists()

    asyncio.run(story())
