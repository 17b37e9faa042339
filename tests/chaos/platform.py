"""The services as processes under a supervisor, one run, and what can be seen of both from outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Engine, func, select
from sqlalchemy.exc import DBAPIError

from etude.demo import DemoOptions
from etude.start import announce
from etude.supervisor import SERVICES, ServiceSpec, Supervisor
from services.scheduler.audit import Report, audit
from shared import bus as buses
from shared import ledger
from shared.contracts import topics
from shared.contracts.messages import RunCommand
from shared.contracts.run import ScheduleConfig
from shared.ledger.models import Event, Run, Trained
from shared.ledger.models import Incarnation as IncarnationRow
from shared.settings import ServiceSettings
from tests.end_to_end import problems
from tests.patience import eventually

STARTED = ("scheduler", "curator", "trainer", "inference", "reward", "grader", "rollout")
MODULES = dict(SERVICES)
COPIES = 4  # of each of 225 problems: enough for some minutes
IDLE = frozenset({"groups", "a run to be started (runs.state)"})  # waiting for work is being well
LOOK_S = 0.2
ASK_S = 3.0  # for an answer of /readyz; a service that needs longer has lost its loop


class NotInTime(AssertionError):
    """Something that must come did not; the text says what."""


@dataclass(slots=True)
class Platform:
    state: Path
    supervisor: Supervisor
    run: str
    engine: Engine
    settings: ServiceSettings

    # The services.

    def start(self, name: str, module: str) -> None:
        self.supervisor.start([ServiceSpec(name, module)])

    def process(self, name: str) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess, KeyError):
            return psutil.Process(self.supervisor.processes()[name])
        return None

    async def alive(self, name: str, within_s: float) -> psutil.Process:
        await until(lambda: self.process(name) is not None, f"{name} to be started", within_s)
        process = self.process(name)
        return process if process else await self.alive(name, within_s)

    def waits(self, name: str) -> dict[str, float] | None:
        """What `/readyz` says the service waits on, and for how many seconds. None: it does not answer."""
        process = self.process(name)
        try:
            told = json.loads((self.state / "run" / f"{name}.json").read_text())
            if process is None or told["pid"] != process.pid:
                return None
            try:
                body = urllib.request.urlopen(f"{told['url']}/readyz", timeout=ASK_S).read()
            except urllib.error.HTTPError as error:
                body = error.read()
            return {wait["waits_on"]: wait["seconds"] for wait in json.loads(body)["waits"]}
        except (OSError, ValueError):
            return None

    def well(self, name: str) -> bool:
        waits = self.waits(name)
        return waits is not None and not set(waits) - IDLE

    def log_lines(self, name: str) -> int:
        with contextlib.suppress(FileNotFoundError), (self.state / "logs" / f"{name}.log").open("rb") as log:
            return sum(1 for _ in log)
        return 0

    # The run. Each of these may raise DBAPIError while the ledger is struck.

    def number(self, table: Any, *conditions: Any) -> int:
        with self.engine.connect() as connection:
            query = select(func.count()).select_from(table).where(table.run_id == self.run, *conditions)
            return int(connection.execute(query).scalar_one())

    def scored(self) -> int:
        """Attempts scored so far: they went through every service but the trainer, and through every server."""
        return self.number(Event, Event.kind == "attempt.scored")

    def trained(self) -> int:
        return self.number(Trained)

    def incarnations(self) -> int:
        return self.number(IncarnationRow)

    def ended(self) -> bool:
        return self.number(Run, Run.state == "finished") == 1

    async def advances(self, count: Callable[[], int], by: int, what: str, within_s: float) -> None:
        """Until `count` is greater by `by` than it is now."""
        before = [-1]

        def more() -> bool:
            try:
                now = count()
            except DBAPIError:
                return False
            if before[0] < 0:
                before[0] = now
            return now >= before[0] + by

        await until(more, f"{what} to go on", within_s)

    async def stop_run(self, within_s: float) -> None:
        bus = buses.connect(self.settings.bus_url, client="chaos")
        try:
            await bus.publish(topics.RUNS_COMMANDS, self.run, RunCommand(run=self.run, action="stop"))
        finally:
            await bus.close()
        await until(self.ended, "the run to end", within_s)

    def audit(self) -> Report:
        return audit(self.engine, self.run, max_staleness=ScheduleConfig().max_staleness)


async def until(there: Callable[[], bool], what: str, within_s: float) -> None:
    """Raises NotInTime. `there` runs in a thread: it may block for a while."""
    try:
        await eventually(partial(asyncio.to_thread, there), what, within_s, LOOK_S)
    except TimeoutError as late:
        raise NotInTime(str(late)) from late


@contextlib.asynccontextmanager
async def serving(state: Path, begin: Callable[[ServiceSettings], Awaitable[str]]) -> AsyncIterator[Platform]:
    """A platform by the settings of the environment, and the run that `begin` names. The services drain at the end."""
    state.mkdir(parents=True, exist_ok=True)
    settings = ServiceSettings(state=state)
    with (state / "supervisor.log").open("a") as said:
        with Supervisor(state, say=lambda text: print(text, file=said, flush=True)) as supervisor:
            supervisor.start(ServiceSpec(name, MODULES[name]) for name in STARTED)
            run = await begin(settings)
            engine = ledger.connect(settings.ledger_url)  # read-only by our own hand: nothing here writes
            try:
                yield Platform(state, supervisor, run, engine, settings)
            finally:
                engine.dispose()


@contextlib.asynccontextmanager
async def running(state: Path, *, seed: int, patience_s: float, pack: Path | None = None) -> AsyncIterator[Platform]:
    """A platform on which a run has trained its first groups. Without `pack` on problems of our own, which last for some
    minutes."""

    async def begin(settings: ServiceSettings) -> str:
        own = None if pack else state / "problems.jsonl"
        if own:
            problems.write(own, copies=COPIES, per_function=1000, seed=seed)
        options = DemoOptions(seed=seed, minutes=0, problems=own, pack=pack, groups_per_step=4, state=state)
        return await announce(options, settings)

    async with serving(state, begin) as platform:

        def begun() -> bool:
            with contextlib.suppress(DBAPIError):
                return platform.trained() > 0
            return False

        await until(begun, "the first groups to be trained", patience_s)
        yield platform
