"""Follows a run's published versions into the running engine.

Invariants:
- The newest version wins; those waiting behind it are skipped.
- Nothing is served that was not verified twice: every tensor of the rebuilt version, and the engine's own copy of it.
- After a failure the version is rebuilt from its full base; the third in a row takes the replica out of rotation and says
  why. It keeps trying, and returns by itself with the first version that it can load.
- A replica that starts again reads both topics from their beginning, and so catches up by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.inference import metrics
from services.inference.api import BadRequest
from services.inference.config import InferenceSettings
from services.inference.engine import Engine
from services.inference.following import Following
from services.inference.weights import LiveWeights
from shared.bus import Bus
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import PolicyApplied
from shared.contracts.run import Ref, RunConfig
from shared.contracts.topics import POLICIES_APPLIED, POLICIES_PUBLISHED, RUNS_CONTROL
from shared.model import load_checkpoint
from shared.objects import ObjectMissing, Objects
from shared.telemetry import Health
from shared.weights import WeightsError, read_manifest, rebuild
from shared.weights.checkpoint_objects import download_directory

FAILURES_TOLERATED = 3
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 15.0
A_RUN, WEIGHTS = "a run to be started (runs.control)", "weights"

log = structlog.get_logger()


class WeightsAgent:
    """`run` until cancelled. `serving` is called with each new engine (one per run and checkpoint)."""

    def __init__(
        self, settings: InferenceSettings, bus: Bus, objects: Objects, health: Health, serving: Callable[[Engine], None]
    ) -> None:
        self.settings, self.bus, self.objects, self.health = settings, bus, objects, health
        self.following = Following(run=settings.run, pinned=settings.pinned if settings.pinned >= 0 else None)
        self.live: LiveWeights | None = None
        self.run_id = ""
        self.directory: Path | None = None
        self._serving = serving
        self._changed = asyncio.Event()
        self._pin_done: list[tuple[int, asyncio.Future[None]]] = []
        health.wait_on(WEIGHTS)

    # -- listening ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._listen())
            group.create_task(self._follow())

    async def _listen(self) -> None:
        async for delivery in self.bus.deliveries([RUNS_CONTROL, POLICIES_PUBLISHED], group=None, max_in_flight=256):
            if delivery.topic is RUNS_CONTROL:
                self.following.control(delivery.message)
            else:
                self.following.published(delivery.message)
            delivery.done()
            self._changed.set()

    async def pin(self, serial: int) -> dict[str, Any]:
        """Serves exactly this version from now on; returns when it does. Raises BadRequest where it cannot be had."""
        if self.settings.checkpoint is not None:
            raise BadRequest(f"serial: found {serial}; this replica serves the checkpoint {self.settings.checkpoint}")
        if not self.run_id or self.live is None:
            raise BadRequest("serial: no run is served yet")
        if serial != 0 and await asyncio.to_thread(self._manifest_of, serial) is None:
            raise BadRequest(f"serial: found {serial}; run {self.run_id} has published no such version")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pin_done.append((serial, done))
        self.following.pinned = serial
        self._changed.set()
        await done
        return {"serial": serial, "run": self.run_id}

    async def leave(self) -> None:
        """Says that this replica serves no more. Best effort: probes notice it too."""
        if self.live is not None and self.run_id:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._announce(self.live.serial, ok=False, reason="shutting down"), 5)

    # -- following ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        if self.settings.checkpoint is not None:
            self.directory = self.settings.checkpoint
            await self._start_engine(self.settings.checkpoint)
        else:
            self.health.wait_on(A_RUN)
        while True:
            run = self.following.current_run()
            if run is not None and run != self.run_id:
                await self._take_up(run)
            elif run is not None and self.settings.checkpoint is None:
                await self._bring_up_to_date()
            self._settle_pins()
            if not self._behind():
                await self._changed.wait()
                self._changed.clear()

    async def _take_up(self, run: str) -> None:
        """Another run is to be served: its base gives the shape, its newest version the weights."""
        if self.settings.checkpoint is None:
            config = await self._insist(lambda: self._run_config(run), f"the configuration of run {run}")
            folder = self.settings.state / "checkpoints" / config.base.checksum
            self.directory = await self._insist(
                lambda: download_directory(self.objects, config.base, folder), f"the base of run {run}"
            )
            await self._start_engine(self.directory, announce_later=True)
        self.run_id = run
        self.health.clear(A_RUN)
        target = None if self.settings.checkpoint else await asyncio.to_thread(self._target)
        if target is None or target[0] == 0:
            await self._served(0.0)

    async def _start_engine(self, directory: Path, *, announce_later: bool = False) -> None:
        s = self.settings

        def build() -> tuple[Engine, LiveWeights]:
            model = load_checkpoint(directory).eval().requires_grad_(False)
            positions = s.context or context_of(directory) or model.config.max_position_embeddings
            engine = Engine(
                model,
                serial=0,
                rows=s.cache_rows,
                positions=positions,
                prefill_tokens=s.prefill_tokens,
                queue_limit=s.queue_limit,
            )
            engine.start()
            return engine, LiveWeights(engine)

        before = self.live
        engine, self.live = await asyncio.to_thread(build)
        if before is not None:
            await asyncio.to_thread(before.engine.stop)
        log.info("engine_started", directory=str(directory), positions=engine.cache.positions, rows=engine.cache.rows)
        if not announce_later:
            await self._served(0.0)

    def _target(self) -> tuple[int, Ref] | None:
        """(serial, manifest) to serve; None: nothing published, or the pinned version is not there (yet). Blocking."""
        pinned = self.following.pinned
        if pinned is None and self.settings.pool == "evaluation":
            return None  # the base, until it is pinned
        if pinned is not None:
            ref = self._manifest_of(pinned)
            return (pinned, ref) if ref is not None else None
        newest = self.following.newest(self.run_id)
        return (newest.serial, newest.manifest) if newest is not None else None

    def _behind(self) -> bool:
        """Whether there is something to do without waiting for news."""
        run = self.following.current_run()
        if run is not None and run != self.run_id:
            return True
        newest = self.following.newest(self.run_id)
        follows = self.settings.checkpoint is None and self.settings.pool == "rollout" and self.following.pinned is None
        return follows and newest is not None and self.live is not None and newest.serial != self.live.serial

    async def _bring_up_to_date(self) -> None:
        """Until the replica serves what it should, or that changes."""
        failures, delay = 0, FIRST_DELAY_S
        while (target := await asyncio.to_thread(self._target)) is not None:
            serial, manifest = target
            assert self.live is not None
            if self.following.current_run() != self.run_id or serial == self.live.serial:
                return
            started = time.perf_counter()
            try:
                pause = await asyncio.to_thread(self._load, serial, manifest, failures > 0)
            except (WeightsError, ObjectMissing, OSError, ValueError) as error:
                failures += 1
                metrics.SWAP_FAILURES.inc()
                log.warning("version_failed", run=self.run_id, serial=serial, failures=failures, error=str(error))
                if failures == FAILURES_TOLERATED:
                    self.health.wait_on(WEIGHTS)
                    await self._announce(serial, ok=False, reason=str(error))
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(LAST_DELAY_S, delay * 2)
                continue
            metrics.SWAP_PREPARE.observe(time.perf_counter() - started - pause)
            metrics.SWAPS.inc()
            metrics.SWAP_PAUSE.observe(pause)
            log.info("version_applied", run=self.run_id, serial=serial, pause_s=round(pause, 6))
            await self._served(pause)
            failures, delay = 0, FIRST_DELAY_S

    def _load(self, serial: int, ref: Ref, from_base: bool) -> float:
        """Blocking. Fetches, rebuilds, verifies, swaps."""
        live = self.live
        assert live is not None
        manifest = read_manifest(self.objects, ref)
        if manifest.serial != serial or manifest.run != self.run_id:
            raise WeightsError(f"manifest {ref.key} is of run {manifest.run} serial {manifest.serial}, not {serial}")
        have = None if from_base else (live.serial, live.bits)
        return live.load(serial, rebuild(self.objects, ref, have), manifest.checksum)

    async def _served(self, pause: float) -> None:
        assert self.live is not None
        metrics.SERIAL.set(self.live.serial)
        self._serving(self.live.engine)
        self.health.clear(WEIGHTS)
        if self.run_id:
            await self._announce(self.live.serial, pause=pause)

    async def _announce(self, serial: int, *, ok: bool = True, pause: float = 0.0, reason: str = "") -> None:
        message = PolicyApplied(
            run=self.run_id,
            replica=self.health.name,
            url=self.health.url,
            pool=self.settings.pool,
            serial=serial,
            pause_s=pause,
            ok=ok,
            reason=reason[:2000],
        )
        await self.bus.publish(POLICIES_APPLIED, self.health.name, message)

    def _settle_pins(self) -> None:
        """Answers those whose pin is served, or has been replaced by a later one."""
        for serial, done in self._pin_done:
            if done.done():
                continue
            if self.live is not None and self.live.serial == serial:
                done.set_result(None)
            elif self.following.pinned != serial:
                done.set_exception(BadRequest(f"serial: {serial} was replaced by {self.following.pinned}"))
        self._pin_done = [(serial, done) for serial, done in self._pin_done if not done.done()]

    # -- the object store --------------------------------------------------------------------------------------------

    def _run_config(self, run: str) -> RunConfig:
        return msgspec.json.decode(self.objects.get(self.following.started[run]), type=RunConfig)

    def _manifest_of(self, serial: int) -> Ref | None:
        try:
            return self.objects.head(f"{policy_prefix(self.run_id, serial)}/manifest.json")
        except ObjectMissing:
            return None

    async def _insist(self, fetch: Callable[[], Any], what: str) -> Any:
        """Until it succeeds: without it there is nothing to serve. Health says what is missing."""
        delay = FIRST_DELAY_S
        while True:
            try:
                result = await asyncio.to_thread(fetch)
            except Exception as error:
                self.health.wait_on(what)
                log.warning("waiting", waits_on=what, error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(LAST_DELAY_S, delay * 2)
            else:
                self.health.clear(what)
                return result


def context_of(directory: Path) -> int:
    """`context` of etude.json, 0 where there is none."""
    try:
        return int(msgspec.json.decode((directory / "etude.json").read_bytes()).get("context", 0))
    except FileNotFoundError:
        return 0
