"""What is done to a platform, and how it is seen to come back.

Every strike returns an `Outcome`; one that does not come back raises NotInTime, which `Outcome.failed` then says.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from infra.servers import fleet
from infra.servers import state as servers
from shared.contracts.run import ScheduleConfig
from shared.ledger.models import Event
from tests.chaos.pairs import Pair
from tests.chaos.platform import LOOK_S, MODULES, STARTED, NotInTime, Platform, until
from tests.standstill import stand_still

BACK_WITHIN_S = 240.0
LEASE_S = ScheduleConfig().lease_s
PAST_LEASE_S = 2 * LEASE_S
LINES_PER_S = 5.0  # of one service's log while a server is away: more is a loop that talks
CORES_IDLE = 0.5  # of one core, for a service that cannot work while a server is away: more is a loop that spins
CANNOT_WORK = ("scheduler", "reward", "grader")  # whatever server is away; others may have attempts or groups in hand
WITHOUT_BUS = ("grader",)  # who neither reads nor writes it
SERVERS = ("kafka", "postgres", "minio", "redis")


@dataclass(slots=True)
class Outcome:
    """`recovery_s`: from the strike or its end (freeze, outage) to being well. `failed`: "" or what did not happen."""

    kind: str  # kill | freeze | stopped | frozen | failover
    victim: str
    recovery_s: float = 0.0
    failed: str = ""
    notes: dict[str, str] = field(default_factory=dict)


async def kill(platform: Platform, victim: str) -> Outcome:
    """SIGKILL; well again when a new process waits on nothing but work."""
    process = await platform.alive(victim, BACK_WITHIN_S)
    outcome = Outcome("kill", victim)
    process.send_signal(signal.SIGKILL)
    began = time.monotonic()

    def back() -> bool:
        new = platform.process(victim)
        return new is not None and new.pid != process.pid and platform.well(victim)

    return await _awaited(outcome, began, until(back, f"{victim} to be well after kill -9", BACK_WITHIN_S))


async def freeze_worker(platform: Platform, spare: str) -> Outcome:
    """A rollout worker stands still past its leases, beside another; what it says afterwards is of an epoch that is over."""
    platform.start(spare, MODULES["rollout"])
    await until(lambda: platform.well(spare), f"{spare} to be well", BACK_WITHIN_S)
    victim = await platform.alive("rollout", BACK_WITHIN_S)
    outcome = Outcome("freeze", "rollout")
    with _still([victim]):
        await asyncio.sleep(PAST_LEASE_S)
    outcome = await _awaited(
        outcome,
        time.monotonic(),
        platform.advances(platform.scored, 1, "scoring after a worker was frozen", BACK_WITHIN_S),
    )
    await asyncio.to_thread(platform.supervisor.stop_service, spare)
    return outcome


async def freeze_trainer(platform: Platform, current: str, successor: str) -> Outcome:
    """A trainer stands still; another takes the run; the first wakes up and must stand aside, not publish."""
    victim = await platform.alive(current, BACK_WITHIN_S)
    outcome = Outcome("freeze", "trainer")
    with _still([victim]):
        started = asyncio.create_task(
            platform.advances(platform.incarnations, 1, "a new trainer's incarnation", BACK_WITHIN_S)
        )
        await asyncio.sleep(LOOK_S)
        platform.start(successor, MODULES["trainer"])
        with contextlib.suppress(NotInTime):
            await started
    if started.exception() is not None:
        outcome.failed = str(started.exception())
        return outcome
    began = time.monotonic()

    def superseded() -> bool:
        return any(waits.startswith("another trainer has the run") for waits in platform.waits(current) or {})

    outcome = await _awaited(outcome, began, until(superseded, "the old trainer to stand aside", BACK_WITHIN_S))
    if not outcome.failed and platform.process(current) != victim:
        outcome.failed = "the frozen trainer did not stay up: started again, it would take the run back"
    if not outcome.failed:
        outcome = await _awaited(
            outcome, began, platform.advances(platform.trained, 1, "training by the new trainer", BACK_WITHIN_S)
        )
    await asyncio.to_thread(platform.supervisor.stop_service, current)
    return outcome


async def freeze_scheduler(platform: Platform, successor: str) -> Outcome:
    """The scheduler that leads stands still; another leads, the run goes on. The first wakes up, in the middle of whatever it
    was at, and stands by; when the other leaves it leads again."""
    victim = await platform.alive("scheduler", BACK_WITHIN_S)
    outcome = Outcome("freeze", "scheduler")
    with _still([victim]):
        began = time.monotonic()
        platform.start(successor, MODULES["scheduler"])
        led = platform.advances(platform.scored, 4, "scoring led by another scheduler", BACK_WITHIN_S)
        outcome = await _awaited(outcome, began, led)
        await asyncio.sleep(max(0.0, began + PAST_LEASE_S - time.monotonic()))
    if not outcome.failed:
        both = platform.advances(platform.trained, 2, "training beside a scheduler that woke up", BACK_WITHIN_S)
        outcome = await _awaited(outcome, time.monotonic() - outcome.recovery_s, both)
    await asyncio.to_thread(platform.supervisor.stop_service, successor)
    if not outcome.failed:
        again = platform.advances(platform.trained, 2, "training led by the first scheduler again", BACK_WITHIN_S)
        outcome = await _awaited(outcome, time.monotonic() - outcome.recovery_s, again)
    return outcome


async def outage(platform: Platform, server: str, mode: str, seconds: float, trainer: str) -> Outcome:
    """A server is stopped (connections refused) or frozen (no answer) for `seconds`; then the run must go on by itself."""
    row = servers.read()[server]
    if row.process is None:
        raise RuntimeError(f"{server} does not run; `make servers` starts it")
    family = [row.process, *row.process.children(recursive=True)]  # PostgreSQL is many processes
    outcome = Outcome(mode, server)
    watch = _Watch(platform, [trainer if name == "trainer" else name for name in STARTED])
    if mode == "frozen":
        with _still(family):
            await watch.during(seconds)
    else:
        row.process.send_signal(row.stop)
        await asyncio.to_thread(psutil.wait_procs, family, 30)
        await watch.during(seconds)
        await asyncio.to_thread(fleet.up, [server])
    outcome.notes = watch.notes()
    outcome.failed = watch.complaint(server)
    scored = platform.advances(platform.scored, 4, f"scoring after {server} was {mode}", BACK_WITHIN_S)
    outcome = await _awaited(outcome, time.monotonic(), scored)
    if not outcome.failed:
        trained = platform.advances(platform.trained, 2, f"training after {server} was {mode}", BACK_WITHIN_S)
        outcome = await _awaited(outcome, time.monotonic() - outcome.recovery_s, trained)
    return outcome


async def fail_over(platform: Platform, pair: Pair) -> Outcome:
    """Another server takes over behind the same address. `recovery_s`: from the moment that it serves until groups are trained."""
    outcome = Outcome("failover", pair.name)
    await asyncio.to_thread(pair.fail_over)
    began = time.monotonic()
    platform.engine.dispose()  # our own sessions would show the ledger as it was

    def recorded() -> int:
        return platform.number(Event)

    for what, count, by in (
        ("recording", recorded, 1),
        ("scoring", platform.scored, 4),
        ("training", platform.trained, 2),
    ):
        if not outcome.failed:
            advance = platform.advances(count, by, f"{what} after the failover of {pair.name}", BACK_WITHIN_S)
            outcome = await _awaited(outcome, began, advance)
            outcome.notes[what] = f"{outcome.recovery_s:.1f} s after the second served"
    return outcome


async def _awaited(outcome: Outcome, began: float, recovery: object) -> Outcome:
    try:
        await recovery  # type: ignore[misc]
    except NotInTime as error:
        outcome.failed = outcome.failed or str(error)
    outcome.recovery_s = time.monotonic() - began
    return outcome


@contextlib.contextmanager
def _still(processes: list[psutil.Process]) -> Iterator[None]:
    """Stopped, and surely continued."""
    try:
        for process in processes:
            stand_still(process)
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


class _Watch:
    """What the services do while a server is away: processor time, log lines, what they say they wait on."""

    def __init__(self, platform: Platform, names: list[str]) -> None:
        self.platform, self.names = platform, names
        self.seconds = 0.0
        self.cores: dict[str, float] = {}
        self.lines: dict[str, float] = {}
        self.said: dict[str, dict[str, float] | None] = {}

    async def during(self, seconds: float) -> None:
        began, before = time.monotonic(), {name: self._used(name) for name in self.names}
        await asyncio.sleep(0.8 * seconds)
        for name in self.names:
            self.said[name] = await asyncio.to_thread(self.platform.waits, name)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        self.seconds = time.monotonic() - began
        for name in self.names:
            cpu, lines = self._used(name)
            self.cores[name] = max(0.0, cpu - before[name][0]) / self.seconds
            self.lines[name] = (lines - before[name][1]) / self.seconds

    def _used(self, name: str) -> tuple[float, int]:
        """(processor seconds so far, log lines so far)"""
        process = self.platform.process(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times() if process else None
            return (times.user + times.system if times else 0.0), self.platform.log_lines(name)
        return 0.0, self.platform.log_lines(name)

    def notes(self) -> dict[str, str]:
        def waits(name: str) -> str:
            said = self.said[name]
            if said is None:
                return "no answer"
            return "; ".join(f"{what[:60]} ({since:.0f} s)" for what, since in said.items()) or "nothing"

        return {
            name: f"waits on {waits(name)}; {self.cores[name]:.2f} cores, {self.lines[name]:.1f} lines/s"
            for name in self.names
        }

    def complaint(self, server: str) -> str:
        """Who hears nothing while `server` is away must say so."""
        listeners = {"kafka": [name for name in self.names if name not in WITHOUT_BUS], "redis": ["grader"]}
        word = {"kafka": "bus", "redis": "jobs"}.get(server, "")
        unaware = [
            name for name in listeners.get(server, []) if not any(word in what for what in self.said[name] or ())
        ]
        silent = [name for name in self.names if self.said[name] is None]
        loud = [f"{name} {self.lines[name]:.1f} lines/s" for name in self.names if self.lines[name] > LINES_PER_S]
        hot = [f"{name} {self.cores[name]:.2f} cores" for name in CANNOT_WORK if self.cores[name] > CORES_IDLE]
        parts = [f"no answer of /readyz: {', '.join(silent)}"] if silent else []
        parts += [f"does not say that {server} is away: {', '.join(unaware)}"] if unaware else []
        return "; ".join([*parts, *loud, *hot])
