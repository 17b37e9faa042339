"""Wiring: HTTP, engine, weight agent, drain."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from services.inference.config import InferenceSettings
from services.inference.live import Engine, Facts
from services.inference.updates import Updates
from services.inference.weights_agent import WeightsAgent
from services.inference.wire import BadRequest, UpdateRequest
from shared import bus as buses
from shared import objects as stores
from shared.bus.watched import watched
from shared.settings import Told
from shared.telemetry import Health, configure_logs, draining, replica_name


class Inference:
    """One replica: the agent brings weights, the server answers with whatever engine the agent last handed over."""

    def __init__(self, settings: InferenceSettings, bus: buses.Bus, objects: stores.Objects) -> None:
        self.settings = settings
        self.engine = _engine(settings, self._facts())
        self.server: Any = self.engine.server
        self.health = Health("inference", settings, self.server.app)
        self.agent = WeightsAgent(settings, bus, objects, self.health, self.engine)
        self.updates = Updates(self.agent)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; then lets what runs finish for `drain_s` and leaves the rotation."""
        following = asyncio.create_task(self.agent.run())
        stopping, breaking = (asyncio.create_task(event.wait()) for event in (stop, self.server.broken))
        try:
            await asyncio.wait({following, stopping, breaking}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                _result(following)  # a defect ends the process with its trace; the supervisor starts another
            if breaking.done():
                raise Told(f"engine: {self.server.broken_by}")  # each step has left its trace in the log
            following.cancel()  # a version that comes now would be announced as served
            await asyncio.wait({following})
            await self._drain()
        finally:
            for task in (following, stopping, breaking):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await following
            await self.engine.close()

    async def _drain(self) -> None:
        self.health.wait_on("its last requests: it is shutting down")
        self.server.draining = True
        await self.agent.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                await self.server.idle.wait()

    def _facts(self) -> Facts:
        return Facts(describe=self._describe, pin=self._pin, checksums=self._checksums, update=self._update)

    def _describe(self) -> dict[str, Any]:
        shown = self.agent.shown
        return {
            "name": self.health.name,
            "run": shown.run if shown else "",
            "pool": self.settings.pool,
            "pinned": self.agent.following.pinned,
            "model_path": str(shown.directory if shown else ""),
            "cache_rows": self.settings.cache_rows,
            "prefill_tokens": self.settings.prefill_tokens,
        }

    async def _pin(self, serial: int) -> dict[str, Any]:
        return await self.agent.pin(serial)

    async def _update(self, asked: UpdateRequest) -> dict[str, Any]:
        """A flush forgets what is kept for sessions; those that run keep their cache, as over every swap."""
        embedded, flushes = self.settings.engine == "embedded", self.settings.flush_on_swap
        if not embedded and asked.flush_cache not in (None, flushes):
            raise BadRequest(f"flush_cache: found {asked.flush_cache}; allowed: {flushes}, as ETUDE_FLUSH_ON_SWAP says")
        serial, pause = await self.updates.load(asked)
        if embedded and asked.flush_cache is not False:
            await asyncio.wrap_future(self.server.engine.flush())
        message = f"version {serial} samples; the engine stood still for {pause * 1000:.3g} ms"
        return {"message": message, "weight_version": str(serial)}

    async def _checksums(self) -> dict[str, Any]:
        shown = self.agent.shown
        assert shown is not None
        serial, digest = await shown.live.checksum()
        return {"serial": serial, "weight_version": str(serial), "checksum": digest, "run": shown.run}


def _result(following: asyncio.Task[None]) -> None:
    """What a person is to be told is told alone, without the group of tasks that it came from."""
    try:
        following.result()
    except BaseExceptionGroup as group:
        error: BaseException = group.split(Told)[0] or group
        while isinstance(error, BaseExceptionGroup) and error is not group:
            error = error.exceptions[0]
        raise error from None


def _engine(settings: InferenceSettings, facts: Facts) -> Engine:
    """Only the chosen one is imported: they share no metric's name, and one needs no numba."""
    if settings.engine == "sglang":
        from services.inference.sglang.kind import Sglang

        return Sglang(settings, facts)
    from services.inference.embedded import Embedded

    return Embedded(settings, facts)


async def main(settings: InferenceSettings) -> None:
    configure_logs("inference", settings)
    settings.state.mkdir(parents=True, exist_ok=True)
    bus = buses.connect(settings.bus_url, client=replica_name("inference", settings))
    objects = stores.connect(settings.objects_url)
    inference = Inference(settings, bus, objects)
    try:
        async with draining() as stop, inference.health, watched(bus, inference.health):
            await inference.run(stop)
    finally:
        await bus.close()
