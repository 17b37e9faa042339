"""Follows a run's published versions into the running engine, whichever it is (`live`).

Invariants:
- The newest version wins; those waiting behind it are skipped.
- Nothing is served that was not verified twice: every tensor of the rebuilt version, and the engine's own copy of it.
- A version that fails is rebuilt from its full base; the third failure in a row takes the replica out of rotation and says
  why, and which version it can still answer with. It keeps trying, also each version that comes meanwhile, and returns by itself
  with the first that it can load. A store that is away says nothing of any version: it is waited for, what serves goes on, and
  the delta after it is fetched.
- A run that cannot be read (no configuration, no base) or served (settings, memory) takes no replica from one that can: it is
  tried again beside it. One that an engine was ended for in vain is tried again where nothing else is to be served, or when it is
  started anew.
- A replica of the pool "serving" goes to the version that was promoted last, of whatever run. Where that is not to be had, what
  it serves goes on, another run's too: it says so, stays in rotation and keeps trying. Only an engine whose device holds one
  model (SGLang) is out from when another run's was found to be there until it serves.
- A replica for evaluations goes to the version of the one that was asked for first, and stays until that has ended.
- A replica that starts again reads its topics from their beginning, and so catches up by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from pathlib import Path
from typing import Any

import structlog

from services.inference import swap_metrics as metrics
from services.inference.announcing import Announcing
from services.inference.candidates import FAILURES_TOLERATED, Candidates, delay_after
from services.inference.config import InferenceSettings
from services.inference.following import Following
from services.inference.live import CannotServe, CannotStart, Engine, Live, Shown
from services.inference.pins import Pins
from services.inference.run_store import RunStore, StoreAway, VersionDamaged, from_store
from services.inference.wire import BadRequest, Unavailable
from shared.bus import Bus, Deliveries
from shared.contracts.life import RunState
from shared.contracts.messages import (
    SHUTTING_DOWN,
    EvalFinished,
    EvalRequested,
    PolicyPromoted,
    PolicyPublished,
    RunStatus,
)
from shared.contracts.run import Ref
from shared.contracts.topics import (
    EVALS_FINISHED,
    EVALS_REQUESTED,
    POLICIES_PROMOTED,
    POLICIES_PUBLISHED,
    RUNS_STATE,
)
from shared.model.config import UnknownModel
from shared.objects import ObjectMissing, Objects
from shared.settings import BadSettings
from shared.telemetry import Health, Wait
from shared.telemetry_spans import Span, span, span_about
from shared.weights import WeightsError

A_RUN, WEIGHTS, OBJECTS = "a run to be started (runs.state)", "weights", "objects"
A_PROMOTION = "a version to be promoted (policies.promoted)"

log = structlog.get_logger()


class WeightsAgent:
    """`run` until cancelled. The engine is started anew for each run and checkpoint."""

    def __init__(self, settings: InferenceSettings, bus: Bus, objects: Objects, health: Health, engine: Engine) -> None:
        self.settings, self.bus, self.health = settings, bus, health
        self.following = Following(run=settings.run, pinned=settings.pinned if settings.pinned >= 0 else None)
        free = settings.pinned < 0 and settings.checkpoint is None
        self._evaluates, self._promotions = free and settings.pool == "evaluation", free and settings.pool == "serving"
        self.following.promotions = self._promotions
        self.candidates = Candidates(self.following)
        self.store = RunStore(objects, settings.state / "checkpoints")
        self.pins = Pins(self.following, self.store)
        self.announcing = Announcing(bus, health, settings.pool)
        self._first = A_PROMOTION if self._promotions else A_RUN
        self.shown: Shown | None = None
        self._awaited = Wait(health)  # the version that should serve and is not there
        self._failing = Wait(health)  # the version that could not be loaded, and why
        self.live: Live | None = None
        self.run_id = ""
        self.directory: Path | None = None
        self._source: Ref | None = (
            None  # the manifest that the live weights were verified against; None: the base directory
        )
        self._announced: int | None = None  # the serial that the others believe to be served here
        self._heard: dict[str, tuple[int, dict[str, str]]] = {}  # run -> the last version's serial, its word's headers
        self._engine = engine
        self._changed, self._published = asyncio.Event(), asyncio.Event()
        health.wait_on(WEIGHTS)

    # -- listening ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        topics = [RUNS_STATE, POLICIES_PUBLISHED]
        if self._evaluates:
            topics += [EVALS_REQUESTED, EVALS_FINISHED]
        if self._promotions:
            topics.append(POLICIES_PROMOTED)
        deliveries = self.bus.deliveries(topics, group=None, max_in_flight=256)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen(deliveries))
            group.create_task(self._follow())
            if self._evaluates or self._promotions:
                group.create_task(self._hear_past(deliveries))

    async def _listen(self, deliveries: Deliveries) -> None:
        async for delivery in deliveries:
            match delivery.message:
                case EvalRequested() | EvalFinished() as message:
                    self.following.evaluation(message)
                case PolicyPromoted() as message:
                    self.following.promotion(message)
                    self._forget(message.run)  # another version of it may be there
                case PolicyPublished() as message:
                    self.following.published(message)
                    self._heard[message.run] = (message.serial, delivery.headers)
                    self._published.set()
                case RunStatus() as message:
                    if self.following.statuses.hear(message) and message.state is RunState.running:
                        self._forget(message.run)  # what kept it from being served may be mended
            delivery.done()
            self._changed.set()

    async def _hear_past(self, deliveries: Deliveries) -> None:
        await deliveries.caught_up()
        self.following.past_heard = True
        self._changed.set()

    async def pin(self, serial: int) -> dict[str, Any]:
        """Serves exactly this version of the run from now on; returns when it does. -1: what the settings say again. Raises
        BadRequest where it cannot be had, Unavailable where nobody can say; then what was served before is."""
        if self.settings.checkpoint is not None:
            raise BadRequest(f"serial: found {serial}; this replica serves the checkpoint {self.settings.checkpoint}")
        run = self.run_id if self.live is not None else ""
        done = await self.pins.ask(run, serial)
        self._announced = None
        self._changed.set()
        if done is not None:
            await done
        return {"serial": serial, "run": run}

    def look(self) -> None:
        """What should be served is asked anew."""
        self._changed.set()

    async def leave(self) -> None:
        """Says that this replica serves no more. Best effort: probes notice it too."""
        if self.shown is not None and self.shown.run:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(5):
                    await self._announce(self.shown.run, self.shown.live.serial, ok=False, reason=SHUTTING_DOWN)

    # -- following ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        if self.settings.checkpoint is not None:
            await self._start_with(self.settings.checkpoint)
            await self._serve(0.0)
        else:
            self.health.wait_on(self._first)
        while True:
            self._changed.clear()  # what is heard from here on is looked at in the next round
            while (run := self._next_run()) is not None:
                await self._take_up(run)
            if self.run_id:
                await self._bring_up_to_date()
                self.health.clear(OBJECTS)
            self._settle_pins()
            await self._news()

    async def _start_with(self, checkpoint: Path) -> None:
        """Nothing else is to be served here: what may come to be is waited for."""
        for failures in itertools.count(1):
            try:
                return await self._start_engine(checkpoint)
            except UnknownModel as error:
                raise BadSettings(f"setting checkpoint: {error}") from None
            except CannotStart as error:
                waits = str(error)
            self.health.wait_on(waits)
            log.warning("waiting", waits_on=waits)
            await asyncio.sleep(delay_after(failures) * random.uniform(0.5, 1.0))
            self.health.clear(waits)

    def _next_run(self) -> str | None:
        return self.candidates.next(self.run_id, time.monotonic())

    async def _news(self) -> None:
        """Returns when something was heard, or a run that could not be read is to be tried again."""
        for run in self.candidates.outdated(self.run_id):
            self._forget(run)
        due = self.candidates.due(self.run_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                await self._changed.wait()

    async def _take_up(self, run: str) -> None:
        """Another run is to be served, if it can be read. Its base gives the shape; which version serves,
        `_bring_up_to_date` decides. One that was promoted is there, before an engine is started."""
        if self.settings.checkpoint is None:
            asked = self.following.asked(run) if self._promotions else None
            what = f"version {asked} of run {run}"
            try:
                if asked is not None:
                    await asyncio.to_thread(self.store.require, run, asked)
                what = f"the configuration of run {run}"
                config = await asyncio.to_thread(self.store.config, self.following.started[run])
                what = f"the base of run {run}"
                directory = await asyncio.to_thread(self.store.base, config)
            except Exception as error:  # whatever is wrong with it: others can be served
                await self._put_off(run, what, error)
                return
            try:
                await self._start_engine(directory)
            except UnknownModel as error:
                await self._put_off(run, what, error)
                return
            except CannotServe as error:
                if isinstance(error, CannotStart):
                    self._lost()
                await self._put_off(run, f"an engine for run {run}: {error}", error)
                return
            self.health.clear(self._first)
        for what in self.candidates.taken_up(run):
            self.health.clear(what)
        self.run_id, self._announced = run, None

    def _lost(self) -> None:
        """Nothing is served: what was, was ended for another run, in vain."""
        self.run_id, self.live, self.shown, self.directory, self._source = "", None, None, None, None
        self._awaited.on("")
        self.health.wait_on(WEIGHTS)

    async def _put_off(self, run: str, what: str, error: Exception) -> None:
        """It is tried again later. Health says what is missing only where there is nothing else to serve; of what was promoted,
        the third failure tells everybody."""
        before = self.candidates.unread.get(run)
        if before is not None and before.what != what:
            self.health.clear(before.what)
        if not self.run_id:
            self.health.wait_on(what)
        log.warning("waiting", waits_on=what, error=f"{type(error).__name__}: {error}")
        alone = isinstance(error, CannotStart)
        tell = self.candidates.put_off(run, what, time.monotonic(), random.uniform(0.5, 1.0), alone=alone)
        asked = self.following.asked(run) if self._promotions else None
        said = what if isinstance(error, CannotServe) else f"{what}: {error}"
        if tell and run == self.following.pinned_run:
            self.pins.refuse(Unavailable(said))
        elif tell and asked is not None:
            self._announced = None
            await self._announce(run, asked, ok=False, reason=said)

    def _forget(self, run: str) -> None:
        if (unread := self.candidates.unread.pop(run, None)) is not None:
            self.health.clear(unread.what)

    async def _start_engine(self, directory: Path) -> None:
        """What answers requests is stopped later, by `_serve`."""
        before = self.live
        self.live = await self._engine.start(directory, self.health)
        self.directory, self._source = directory, None
        if not self._engine.serving:
            self.health.wait_on(WEIGHTS)
        if before is not None and (self.shown is None or before is not self.shown.live):
            await before.stop()

    def _target(self, asked: int | None) -> tuple[int, Ref | None] | None:
        """(serial, manifest) of what should serve; manifest None: the base as it is. None: the version that was asked for is not
        there (yet). Blocking."""
        if self.settings.checkpoint is not None:
            return 0, None
        if asked is not None:
            return self.store.version(self.run_id, asked)
        if self.settings.pool != "rollout":  # what serves stays, at first the base
            assert self.live is not None
            return self.live.serial, self._source
        newest = self.following.newest(self.run_id)
        return (0, None) if newest is None else (newest.serial, newest.manifest)

    async def _bring_up_to_date(self) -> None:
        """Returns when the replica serves what it should, or cannot know it before there is news."""
        before = self.following.asked(self.run_id)
        failures, damaged, away = 0, False, 0
        told: int | None = None  # the version of which everybody was told that it cannot be loaded
        while self._next_run() is None:
            self._published.clear()
            started, serial, asked = time.perf_counter(), -1, self.following.asked(self.run_id)
            if self._promotions and asked is None:
                return  # a version of another run is promoted, and not to be had (yet): what serves goes on
            if asked != before:
                failures, damaged, before, told = 0, False, asked, None
            try:
                target = await from_store(self._target, asked)
                if target is None and asked is not None and self._promotions:
                    serial = asked
                    raise WeightsError(f"version {asked} of run {self.run_id} is not there")
                if target is None:
                    if self.pins.refuse(BadRequest(f"serial: version {asked} of run {self.run_id} is gone")):
                        continue
                    self._awaited.on(f"version {asked}")
                    return
                self._awaited.on("")
                serial, manifest = target
                if self._serves(serial, manifest):
                    if self._announced != serial:
                        await self._serve(0.0)
                    return
                with self._span("swap", serial):
                    pause = await self._load(serial, manifest, damaged)
            except StoreAway as error:
                away += 1
                await self._store_away(away, error)
                continue
            except (WeightsError, ObjectMissing, OSError, ValueError) as error:
                failures, away = failures + 1, 0
                damaged |= not isinstance(error, OSError)  # a disk of this machine: fetched anew it is no other version
                metrics.SWAP_FAILURES.inc()
                self.health.clear(OBJECTS)
                log.warning("version_failed", run=self.run_id, serial=serial, failures=failures, error=str(error))
                if failures >= FAILURES_TOLERATED and serial != told:
                    told = serial
                    refused = f"serial: version {serial} of run {self.run_id} cannot be served: {error}"
                    waited = asked is not None and self.pins.refuse(BadRequest(refused))
                    if waited and self.following.asked(self.run_id) != asked:
                        continue
                    self._announced = None
                    if not self._stays:
                        self._failing.on(f"{WEIGHTS}: version {serial} cannot be loaded: {error}")
                    await self._left(serial, error)
                with contextlib.suppress(TimeoutError):  # what is published next may be whole
                    async with asyncio.timeout(delay_after(failures) * random.uniform(0.5, 1.0)):
                        await self._published.wait()
                continue
            self.health.clear(OBJECTS)
            metrics.SWAP_PREPARE.observe(time.perf_counter() - started - pause)
            metrics.SWAPS.inc()
            metrics.SWAP_PAUSE.observe(pause)
            log.info("version_applied", run=self.run_id, serial=serial, pause_s=round(pause, 6))
            with self._span("serve", serial):
                await self._serve(pause)
            failures, damaged, away, told = 0, False, 0, None

    async def _store_away(self, times: int, error: StoreAway) -> None:
        """Waits a while. What serves goes on; who waits for a pin is not kept waiting for the store."""
        if times == 1:
            log.warning("objects_unavailable", run=self.run_id, error=str(error))
        if not self._stays:
            self.health.wait_on(OBJECTS)
        if times >= FAILURES_TOLERATED:
            self.pins.refuse(Unavailable(f"the object store does not answer: {error}"))
        await asyncio.sleep(delay_after(times) * random.uniform(0.5, 1.0))

    @property
    def _stays(self) -> bool:
        """Whether what answers requests goes on where another version cannot be had."""
        return self._promotions and self._engine.serving

    async def _left(self, serial: int, error: Exception) -> None:
        """Tells everybody that this version could not be loaded, and which one still answers requests."""
        shown = self.shown if self._engine.serving else None
        holds = shown.live.serial if shown is not None and shown.run == self.run_id else -1
        lost = isinstance(error, VersionDamaged)
        await self._announce(self.run_id, serial, ok=False, reason=str(error), damaged=lost, serving=holds)

    def _span(self, name: str, serial: int) -> Span:
        """Below the word that published the version, if it is the last one heard; else in the trace of the run."""
        heard, headers = self._heard.get(self.run_id, (-1, {}))
        if heard == serial:
            return span(name, headers, run=self.run_id, serial=serial, replica=self.health.name)
        return span_about(name, self.run_id, run=self.run_id, serial=serial, replica=self.health.name)

    def _serves(self, serial: int, manifest: Ref | None) -> bool:
        return self.live is not None and self.live.serial == serial and self._source == manifest

    async def _load(self, serial: int, ref: Ref | None, from_base: bool) -> float:
        """Fetches, rebuilds, verifies, swaps; returns the pause in seconds."""
        assert self.live is not None
        assert self.directory is not None
        rebuilt = (self.live, self.run_id, self.directory, serial, ref, from_base)
        wanted = await from_store(self.store.rebuilt, *rebuilt)
        pause = 0.0 if wanted is None else await self.live.load(serial, *wanted)
        self._source = ref
        return pause

    async def _serve(self, pause: float) -> None:
        """From here on requests are answered with what is live; tells everybody."""
        assert self.live is not None
        assert self.directory is not None
        metrics.SERIAL.labels(self.settings.pool).set(self.live.serial)
        self._engine.serve(self.live)
        before, self.shown = self.shown, Shown(self.live, self.run_id, self.directory)
        self.health.clear(WEIGHTS)
        self._failing.on("")
        if before is not None and before.live is not self.live:
            await before.live.stop()
        if self.run_id:
            await self._announce(self.run_id, self.live.serial, pause_s=pause)
            self._announced = self.live.serial

    async def _announce(self, run: str, serial: int, *, reason: str = "", **said: Any) -> None:
        """`said`: further fields of PolicyApplied."""
        on_request = self._evaluates and self.following.pinned is None
        await self.announcing.say(run, serial, reason, on_request=on_request, **said)

    def _settle_pins(self) -> None:
        if self.run_id and self.live is not None:
            self.pins.settle(self.run_id, self.live.serial)
        elif self.pins.refuse(Unavailable("nothing is served; /readyz says what is waited for")):
            self._changed.set()
