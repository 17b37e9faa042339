"""Wiring: waits for its turn to lead, then batch after batch: messages → desk (one transaction) → relay. Beside it the
housekeeping of objects."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

import msgspec
import structlog
from prometheus_client import Counter, Gauge, Histogram
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from services.scheduler import measures, recovery
from services.scheduler.clock import Clock
from services.scheduler.config import SchedulerConfig
from services.scheduler.desk import Desk, Result
from services.scheduler.housekeeping import Housekeeping
from services.scheduler.leadership import Leadership
from services.scheduler.relay import Relay
from services.scheduler.store import Fenced, Store
from services.scheduler.watermark import Watermark
from shared.bus import Bus, BusUnavailable, Delivery
from shared.bus.batching import batches
from shared.contracts import topics as t
from shared.contracts.messages import Alert
from shared.contracts.run import Ref, RunConfig
from shared.objects import Objects
from shared.telemetry import Health

log = structlog.get_logger()

CONSUMED = (
    t.PROBLEMS_ADMITTED,
    t.ATTEMPTS_PROGRESS,
    t.ROLLOUTS_FINISHED,
    t.ROLLOUTS_SCORED,
    t.GROUPS_QUARANTINED,
    t.STEPS_COMMITTED,
    t.POLICIES_PUBLISHED,
    t.POLICIES_APPLIED,
    t.POLICIES_PROMOTED,
    t.RUNS_COMMANDS,
    t.RUNS_STATE,
    t.ALERTS,
)
FROM_WORKERS = (t.ATTEMPTS_PROGRESS, t.ROLLOUTS_FINISHED, t.ROLLOUTS_SCORED)  # what leases are judged by
GROUP, WORKERS = "scheduler", "rollout"  # groups of the bus
IN_FLIGHT = 4  # batches' worth of messages taken and not acknowledged
TICK_S = 1.0  # time passes without messages too: leases, budgets
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 15.0  # between attempts to reach a ledger or object store that is away
ASK_WITHIN_S = 5.0  # the bus, whether anything is unread
PATIENCE_S = 5.0  # a gate that is closed for less is a gate that works
KEEP_MESSAGES_S, PRUNE_EVERY_S = 3600.0, 600.0  # published rows of the outbox
LEAVE_WITHIN_S = 5.0  # making room for a successor is a courtesy: without it the lease runs out

STORES = "the ledger or the object store"
REASON_CHARS = 300  # of a store's error, as /readyz and `etude status` show it
HANGS_S = 3.0  # a call of a store takes milliseconds; the reading of a large run, at the start, says so

T = TypeVar("T")

MESSAGES = Counter("etude_scheduler_messages_total", "Messages handled.", ["topic", "outcome"])
ALERTS = Counter(  # here, since everybody's alerts come by
    "etude_scheduler_alerts_total", "Alerts that any service has raised.", ["run", "name", "severity"]
)
BATCH = Histogram("etude_scheduler_batch_seconds", "Handling one batch, its transaction included.")
LEADS = Gauge("etude_scheduler_leader", "1 while this process leads.")
OUTBOX = Gauge("etude_scheduler_outbox_messages", "Committed messages that wait for the bus.")


async def serve(
    config: SchedulerConfig, engine: Engine, bus: Bus, objects: Objects, health: Health, stop: asyncio.Event
) -> None:
    """Until `stop`. Leads, or waits to lead; when it is fenced it waits again."""
    leadership = Leadership(engine, config.leadership_s, health.name)
    while not stop.is_set():
        term = await _turn(leadership, config.leadership_s, health, stop)
        if term is None:
            return
        log.info("leading", term=term)
        LEADS.set(1)
        try:
            await _Term(config, engine, bus, objects, health, leadership, term, stop).run()
        except Fenced as why:
            log.warning("fenced", why=str(why))
        finally:
            LEADS.set(0)
            for gauge in measures.BY_RUN:
                gauge.clear()  # the successor's are true now
            OUTBOX.set(0)
    await _leave(leadership)


async def _leave(leadership: Leadership) -> None:
    """A ledger that is away is not waited for."""
    try:
        async with asyncio.timeout(LEAVE_WITHIN_S):
            await asyncio.to_thread(leadership.leave)
    except (DBAPIError, TimeoutError) as error:
        log.warning("lease_not_given_back", error=str(error) or type(error).__name__)


async def _turn(leadership: Leadership, lease_s: float, health: Health, stop: asyncio.Event) -> int | None:
    """Waits until this process leads; None: it was told to stop first."""
    waiting, delay = "", FIRST_DELAY_S
    try:
        while not stop.is_set():
            try:
                term = await asyncio.to_thread(leadership.try_lead)
                if term is not None:
                    return term
                said = f"its turn to lead: {await asyncio.to_thread(leadership.holder)} leads now"
                delay = lease_s / 6
            except DBAPIError as error:
                said, delay = f"the ledger: {error.orig}", min(LAST_DELAY_S, delay * 2)
            if said != waiting:
                health.clear(waiting)
                health.wait_on(said)
                waiting = said
            await _pause(stop, delay)
        return None
    finally:
        health.clear(waiting)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()


class _Stopped(Exception):
    """Told to stop while the stores are away. What was in hand is not acknowledged and comes again."""


class _Term:
    """One stretch of leading. A new one starts from the ledger alone."""

    def __init__(
        self,
        config: SchedulerConfig,
        engine: Engine,
        bus: Bus,
        objects: Objects,
        health: Health,
        leadership: Leadership,
        term: int,
        stop: asyncio.Event,
    ) -> None:
        def read_config(ref: Ref) -> RunConfig:
            return msgspec.json.decode(objects.get(ref), type=RunConfig)

        self.config, self.bus, self.health, self.leadership = config, bus, health, leadership
        self.stop = stop
        self.store = Store(engine)
        self.desk = Desk(
            self.store,
            read_config,
            term=term,
            attempt_s=config.attempt_limit_s,
            grading_s=config.grading_limit_s,
            replica_patience_s=config.replica_patience_s,
            read_checkpoint=lambda run: recovery.newest(objects, run),
            read_begun=lambda run, after: recovery.begun(objects, run, after),
            read_newest=lambda run, known: recovery.newest_version(objects, run, known),
        )
        self.clock = Clock()
        self.relay = Relay(bus)
        self.housekeeping = Housekeeping(config, objects, bus, read_config, term)
        self.away: list[str] = []  # the store that does not answer, and why; []: none is known to be away
        self.waits: dict[str, float] = {}  # what for -> since (monotonic)
        self.pruned_at = time.monotonic()
        self.watermark = Watermark()
        self.measured: set[str] = set()  # runs that have gauges

    async def run(self) -> None:
        leave = asyncio.Event()
        renewing = asyncio.create_task(self._renew(leave))
        keeping = asyncio.create_task(self.housekeeping.run())
        stopping = asyncio.create_task(self.stop.wait())
        stopping.add_done_callback(lambda _: leave.set())
        try:
            self.clock.not_before(await self._patiently(self.store.newest))
            self.relay.add(await self._patiently(self.store.pending))  # committed, and perhaps never published
            async with contextlib.aclosing(self._inbound(leave)) as inbound:
                async for batch in inbound:
                    await self._handle(batch)
            if renewing.done():
                renewing.result()  # Fenced
            await self._handle([])  # the last marks
        except _Stopped as why:
            log.warning("stopped_without_the_stores", why=str(why))
        finally:
            for what in (*self.waits, *self.away):
                self.health.clear(what)
            for run in self.measured:
                self.health.tell(run, None)
            for task in (renewing, keeping, stopping):
                task.cancel()
            await asyncio.gather(renewing, keeping, stopping, return_exceptions=True)

    async def _renew(self, leave: asyncio.Event) -> None:
        """Ends the term when the lease is lost. A ledger that is away is waited for: nobody else can lead without it."""
        try:
            while True:
                await asyncio.sleep(self.config.leadership_s / 4)
                try:
                    await asyncio.to_thread(self.leadership.renew)
                except DBAPIError as error:
                    log.warning("ledger_unavailable", error=str(error.orig))
        finally:
            leave.set()

    async def _inbound(self, leave: asyncio.Event) -> AsyncGenerator[list[Delivery], None]:
        """Batches, and an empty one when a tick passes without any."""
        size = self.config.batch_size
        deliveries = self.bus.deliveries(CONSUMED, group=GROUP, max_in_flight=IN_FLIGHT * size)
        source = batches(deliveries, size, self.config.batch_linger_s)

        async def following() -> list[Delivery]:
            return await anext(source)

        leaving = asyncio.create_task(leave.wait())
        coming: asyncio.Task[list[Delivery]] | None = None
        try:
            while not leave.is_set():
                coming = coming or asyncio.create_task(following())
                await asyncio.wait({coming, leaving}, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    batch, coming = coming.result(), None
                    yield batch
                elif not leave.is_set():
                    yield []
        finally:
            leaving.cancel()
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            await source.aclose()  # type: ignore[attr-defined]
            await deliveries.aclose()

    async def _handle(self, batch: Sequence[Delivery]) -> None:
        """One batch until it is durable, however long the ledger is away. Raises Fenced, _Stopped."""
        marks = self.relay.marks()
        listening, upto = await self._listening()
        unread = await self._requests_unread()

        def handle() -> Result:
            with BATCH.time():
                return self.desk.handle(
                    batch, self.clock.now(), marks, listening=listening, read_upto=upto, requests_unread=unread
                )

        result = await self._patiently(handle)
        self.relay.marked(marks)
        for index, delivery in enumerate(batch):
            refused = result.refused.get(index)
            MESSAGES.labels(delivery.topic.name, "refused" if refused else "handled").inc()
            if refused:
                log.warning("refused", topic=delivery.topic.name, key=delivery.key, why=refused)
                delivery.bury(refused)
            else:
                if isinstance(delivery.message, Alert):
                    ALERTS.labels(delivery.message.run, delivery.message.name, delivery.message.severity).inc()
                delivery.done()
        self.relay.add(result.outbox)
        if await self.relay.publish():
            self.health.clear("the bus")
        else:
            self.health.wait_on("the bus")
        self._report(result)
        await self._prune()

    async def _listening(self) -> tuple[bool, float | None]:
        """Whether it is known what the bus holds, and up to when everything that workers and graders said has been handled
        (None: it does not matter now). Only where a lease would run out is the bus asked: then the worker's words may be
        waiting in a partition that is read later than others, or cannot be read."""
        now = self.clock.now()
        if not self.desk.overdue(now):
            return True, None
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                standing = await self.bus.standing(FROM_WORKERS, GROUP)
        except (BusUnavailable, TimeoutError) as error:
            log.warning("cannot_listen", error=str(error) or type(error).__name__)
            self.watermark = Watermark()
            return False, None
        return True, self.watermark.advance(now, standing)

    async def _requests_unread(self) -> bool | None:
        """Whether the bus holds requests that no worker has acknowledged. None: it does not matter now, or is not known."""
        if not self.desk.idle(self.clock.now()):
            return None
        try:
            async with asyncio.timeout(ASK_WITHIN_S):
                return any((await self.bus.lag([t.ROLLOUTS_REQUESTED], WORKERS)).values())
        except (BusUnavailable, TimeoutError):
            return None

    async def _patiently(self, call: Callable[[], T]) -> T:
        """In a thread, again and again while the stores are away. After a failed commit nobody knows whether it took
        place; what it would have published is in the ledger then, and is fetched before anything else.

        Raises _Stopped when it fails once more after the scheduler was told to stop."""
        delay, failed = FIRST_DELAY_S, False
        while True:
            # A store that hangs raises nothing for as long as its kernel answers.
            hangs = asyncio.get_running_loop().call_later(HANGS_S, self.health.wait_on, STORES)
            try:
                if failed:
                    self.relay.add(await asyncio.to_thread(self.store.pending))
                result = await asyncio.to_thread(call)
                for said in (STORES, *self.away):
                    self.health.clear(said)
                self.away.clear()
                return result
            except (DBAPIError, OSError) as error:
                failed = True
                self._wait_on_store(error)
                log.warning("stores_unavailable", error=str(error), again_in_s=delay)
                if self.stop.is_set():
                    raise _Stopped(str(error)) from error
                await _pause(self.stop, delay)
                delay = min(LAST_DELAY_S, delay * 2)
            finally:
                hangs.cancel()

    def _wait_on_store(self, error: DBAPIError | OSError) -> None:
        """Say which store is away, and why."""
        why = (
            str(error.orig if isinstance(error, DBAPIError) else error).strip().partition("\n")[0]
            or type(error).__name__
        )
        away = [f"{'the ledger' if isinstance(error, DBAPIError) else STORES}: {why[:REASON_CHARS]}"]
        for said in (STORES, *self.away):
            if said not in away:
                self.health.clear(said)
        self.away = away
        self.health.wait_on(away[0])

    async def _prune(self) -> None:
        if time.monotonic() - self.pruned_at > PRUNE_EVERY_S:
            self.pruned_at = time.monotonic()
            try:
                await asyncio.to_thread(self.store.prune, self.clock.now() - KEEP_MESSAGES_S, self.desk.term)
            except (DBAPIError, OSError) as error:  # nothing hangs on it; the next batch waits for the ledger
                log.warning("not_pruned", error=str(error), again_in_s=PRUNE_EVERY_S)

    def _report(self, result: Result) -> None:
        now = time.monotonic()
        for what in [known for known in self.waits if known not in result.waits]:
            del self.waits[what]
            self.health.clear(what)
        for what in result.waits:
            if now - self.waits.setdefault(what, now) > PATIENCE_S:
                self.health.wait_on(what)
        for run in self.measured - self.desk.sets.keys():
            self.health.tell(run, None)
        for run, ws in self.desk.sets.items():
            self.health.tell(run, measures.gate_words(ws) or None)
        OUTBOX.set(self.relay.waiting)
        self.measured = measures.measure(self.desk.sets, self.measured)
