"""While this scheduler leads: every run's objects are counted and held against its quota, and what nobody needs is deleted.

Invariants
- Scheduling never waits for it. It has a thread and a read-only connection to the ledger of its own, and says that a quota is
  exceeded on the bus, as everybody says an alert. What fails is logged, and tried again in the next round.
- Nothing is deleted once another scheduler leads: the term is looked at before, and again while it goes on. (What a thread
  that froze in between still deletes is what nobody needed: no later word makes a given-up attempt count.)
- It ends at once: a thread that hangs in a store is left behind, and finds that it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from prometheus_client import Counter, Gauge
from sqlalchemy import Connection, func, or_, select
from sqlalchemy.exc import DBAPIError

from services.scheduler.config import SchedulerConfig
from services.scheduler.control import ReadConfig
from services.scheduler.desk import KEEP_FINISHED_S
from services.scheduler.garbage import Garbage
from services.scheduler.quota import GB, Kind, by_kind, exceeded, rest_s
from services.scheduler.store import LEASE, Fenced
from services.scheduler.sweep import checkpoints_of, chunks, unneeded
from shared import ledger
from shared.bus import Bus
from shared.contracts.life import RunState
from shared.contracts.run import ScheduleConfig
from shared.contracts.topics import ALERTS
from shared.ledger.models import Event, LeaseRow, Run
from shared.objects import Objects

log = structlog.get_logger()

FIRST_S = 60.0  # after taking the lead: reading the ledger and catching up come first
LOOK_S = 1.0  # between two looks at the term while it deletes: a successor leads within ten seconds
LONG_S = 300.0  # after so long it is said that a store hangs, or that a run is large
OVER_S = 24 * 3600.0  # a run that ended before was gone through, or shall be by hand

T = TypeVar("T")

BYTES = Gauge(
    "etude_scheduler_run_objects_bytes", "What a run's objects take, when they were last counted.", ["run", "kind"]
)
QUOTA = Gauge("etude_scheduler_run_quota_bytes", "What they may take before the run is paused; 0: no quota.", ["run"])
DELETED = Counter(
    "etude_scheduler_deleted_bytes_total", "Objects that were deleted because nobody needs them.", ["run", "kind"]
)


@dataclass(frozen=True, slots=True)
class RunNow:
    """`running_since`: the beginning of its latest stretch of running."""

    state: RunState
    running_since: float
    schedule: ScheduleConfig


@dataclass(frozen=True, slots=True)
class Counted:
    """`taken`: after sweeping. `began`: the counting, Unix seconds."""

    began: float
    standing: RunNow
    taken: dict[Kind, int]
    deleted: dict[Kind, int]
    left: int  # objects that nobody needs and that could not be deleted


class Housekeeping:
    def __init__(
        self, config: SchedulerConfig, objects: Objects, bus: Bus, read_config: ReadConfig, term: int | None
    ) -> None:
        """`term`: of the leadership under which it deletes."""
        self._every_s, self._patience_s = config.sweep_every_s, config.replica_patience_s
        # A reader's: a transaction of the scheduler's own engine would hold SQLite's write lock.
        self._engine = ledger.connect(config.ledger_url, read_only=True)
        self._objects, self._bus, self._read_config, self._term = objects, bus, read_config, term
        self._ended: dict[str, float] = {}  # runs that were gone through after they had finished -> when they had
        self._said: dict[str, float] = {}  # run -> the stretch of running in which its excess was said
        self._over = threading.Event()

    async def run(self) -> None:
        """Round after round, until it is cancelled or another scheduler leads."""
        rest = min(FIRST_S, self._every_s)
        try:
            while self._every_s:
                await asyncio.sleep(rest)
                began = time.monotonic()
                await self._round()
                rest = rest_s(self._every_s, time.monotonic() - began)
        except Fenced as why:
            log.warning("housekeeping_fenced", why=str(why))
        finally:
            self._over.set()
            for gauge in (BYTES, QUOTA):
                gauge.clear()  # the successor's are true now
            self._engine.dispose()

    async def _round(self) -> None:
        due: list[tuple[str, float]] = []
        with _tried():
            due = await _aside(self._due)
        for run, finished_at in due:
            with _tried(run=run):
                counted = await _aside(partial(self._count, run))
                await self._report(run, counted)
                if finished_at and not counted.left:
                    self._ended[run] = finished_at

    async def _report(self, run: str, found: Counted) -> None:
        for kind in Kind:
            BYTES.labels(run, kind.value).set(found.taken[kind])
            DELETED.labels(run, kind.value).inc(found.deleted[kind])
        standing = found.standing
        QUOTA.labels(run).set(standing.schedule.quota_gb * GB)
        if standing.state is not RunState.running or standing.running_since > found.began:
            return  # resumed while it was counted: what is counted may be what made room for it
        alert = exceeded(run, found.taken, standing.schedule.quota_gb)
        if alert and self._said.get(run) != standing.running_since:
            await self._bus.publish(ALERTS, run, alert)  # comes back to the scheduler, which pauses the run
            self._said[run] = standing.running_since

    # In the thread

    def _due(self) -> list[tuple[str, float]]:
        """Runs that are not finished (0), and once those that are: when they had. A run's last words come first."""
        now = time.time()
        recent = or_(Run.state != RunState.finished, Run.finished_at > now - OVER_S)
        query = select(Run.run_id, Run.state, Run.finished_at).where(recent).order_by(Run.created_at)
        with self._engine.begin() as connection:
            rows = connection.execute(query).all()
        ended = {run: at or now for run, state, at in rows if state == RunState.finished}
        # The others were resumed since, perhaps have finished once more, or are long over.
        self._ended = {run: at for run, at in self._ended.items() if ended.get(run) == at}
        not_yet = {run for run, at in ended.items() if run not in self._ended and at < now - KEEP_FINISHED_S}
        return [(run, ended.get(run, 0.0)) for run, _, _ in rows if run not in ended or run in not_yet]

    def _count(self, run: str) -> Counted:
        """So many objects at a time. What nobody needs of them goes at once: a version that somebody promotes or evaluates
        from now on must not go minutes later."""
        began, objects, left = time.time(), 0, 0
        taken, deleted = by_kind({}), by_kind({})
        checkpoints = checkpoints_of(self._objects, run)
        for chunk in chunks(self._listed(run)):
            sizes = dict(chunk)
            with self._engine.begin() as connection:
                last = self._standing(connection, run).schedule.keep_versions or None
                garbage = unneeded(
                    connection,
                    self._objects,
                    run,
                    sizes,
                    patience_s=self._patience_s,
                    checkpoints=checkpoints,
                    last=last,
                )
            # Where the store did not delete, it is not asked again in this round.
            gone = {key: sizes.pop(key) for key in self._delete(run, [] if left else garbage)}
            objects, left = objects + len(gone), left + len(garbage) - len(gone)
            for kind in Kind:
                taken[kind] += by_kind(sizes)[kind]
                deleted[kind] += by_kind(gone)[kind]
        if objects:
            log.info("swept", run=run, objects=objects, bytes=sum(deleted.values()))
        with self._engine.begin() as connection:
            return Counted(began, self._standing(connection, run), taken, deleted, left)

    def _listed(self, run: str) -> Iterator[tuple[str, int]]:
        for one in self._objects.sizes(f"runs/{run}/"):
            self._go_on()
            yield one

    def _standing(self, connection: Connection, run: str) -> RunNow:
        since = select(func.max(Event.at)).where(Event.run_id == run, Event.subject == "", Event.kind == "run.running")
        state, config = connection.execute(select(Run.state, Run.config).where(Run.run_id == run)).one()
        schedule = self._read_config(config).schedule if config else ScheduleConfig()
        return RunNow(RunState(state), connection.execute(since).scalar() or 0.0, schedule)

    def _delete(self, run: str, garbage: Sequence[Garbage]) -> list[str]:
        """What was deleted: less than all where the store fails, or does not let us. What is left counts all the same."""
        gone: list[str] = []
        looked_at = float("-inf")
        try:
            for one in garbage:
                self._go_on()
                if time.monotonic() - looked_at > LOOK_S:
                    self._require_term()
                    looked_at = time.monotonic()
                self._objects.delete(one.key)
                gone.append(one.key)
        except OSError as error:
            log.warning("not_deleted", run=run, objects=len(garbage) - len(gone), error=str(error))
        return gone

    def _go_on(self) -> None:
        if self._over.is_set():
            raise Fenced(f"term {self._term} is over: this scheduler leads no more")

    def _require_term(self) -> None:
        with self._engine.begin() as connection:
            held = connection.execute(select(LeaseRow.term).where(LeaseRow.name == LEASE)).scalar()
        if held != self._term:
            raise Fenced(f"term {self._term} is over: the lease is at term {held}")


@contextlib.contextmanager
def _tried(**of: str) -> Iterator[None]:
    """Whatever goes wrong is logged and gets no further; but for the end of the term."""
    try:
        yield
    except Fenced:
        raise
    except Exception as error:
        away = isinstance(error, DBAPIError | OSError)
        log.warning("housekeeping_failed", **of, error=f"{type(error).__name__}: {error}", exc_info=not away)


async def _aside(call: Callable[[], T]) -> T:
    """In a thread that nobody waits for at the end, unlike asyncio's own: a file system may hang for ever."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="housekeeping", daemon=True).start()
    result = asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait({result}, timeout=LONG_S))[0]:
            log.warning("housekeeping_takes_long", more_than_s=LONG_S)
        return result.result()
    finally:
        result.cancel()
