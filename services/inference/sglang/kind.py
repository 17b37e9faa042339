"""SGLang as the service wires it: the child's command, its life, its metrics among ours."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.inference.checkpoint import context_of
from services.inference.config import InferenceSettings
from services.inference.live import Facts, Live
from services.inference.published import bits_of
from services.inference.sglang.api import Api
from services.inference.sglang.child import Child, free_port
from services.inference.sglang.client import Client, ServerLost, ServerRefused
from services.inference.sglang.flags import FlagsRefused, Launch, child_environment, launch
from services.inference.sglang.live import SglangLive
from services.inference.sglang.place import Place
from services.inference.sglang.server import Server
from shared.model import load_checkpoint
from shared.model.config import ModelConfig
from shared.settings import Told
from shared.telemetry import Health


class Sglang:
    """Implements services.inference.live.Engine."""

    def __init__(self, settings: InferenceSettings, facts: Facts) -> None:
        self.settings = settings
        self.client = Client(settings.sglang_url)
        self.server = Api(facts, self.client)
        self._keeping: asyncio.Task[None] | None = None
        self._keeper: Server | None = None
        self._live: SglangLive | None = None
        self._place: Place | None = None
        self._directory: Path | None = None  # of the weights that are handed to `serve` next
        self._starts = 0
        self._passed = _Passed()
        REGISTRY.register(self._passed)

    @property
    def serving(self) -> bool:
        return self.server.live is not None

    async def start(self, directory: Path, health: Health) -> Live:
        """Returns when the server is up. A device that holds one model has no room for two: what ran before is ended, once the
        checkpoint was read."""
        model = ModelConfig.load(directory)
        context = self.settings.context or context_of(directory) or model.max_position_embeddings
        bits = await asyncio.to_thread(lambda: bits_of(load_checkpoint(directory)))
        await self._end()
        if self._place is None:
            self._place = await asyncio.to_thread(Place, self.settings.sglang_folder, self.settings.name)
        if self._live is not None:
            await self._live.stop()  # before the next one is written: there may be no room for both
        self._starts += 1
        live = self._live = SglangLive(
            self.settings, model, context, self.client, self._place.folder / str(self._starts)
        )
        self._compose(live, "0")  # refused at once, not at every start
        await live.begin(0, bits)
        await self.client.open()
        start = None if self.settings.sglang_url else lambda: self._start_child(live)
        keeper = Server(self.client, health, start=start, check=live.check, start_s=self.settings.sglang_start_s)
        keeper.scraped = self._passed.take
        live.server, self._directory = keeper, directory
        self._keeper = keeper
        self._keeping = asyncio.create_task(keeper.run())
        up = asyncio.create_task(keeper.up.wait())
        await asyncio.wait({self._keeping, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if self._keeping.done():
            self._keeping.result()
        return live

    def serve(self, live: Live) -> None:
        assert isinstance(live, SglangLive)
        self.server.live, self.server.keeper, self.server.directory = live, self._keeper, self._directory

    async def close(self) -> None:
        await self._end()
        if self._live is not None:
            await self._live.stop()
        if self._place is not None:
            await asyncio.to_thread(self._place.leave)
            self._place = None
        await self.client.close()
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(self._passed)

    async def _end(self) -> None:
        self.server.live = self.server.keeper = None
        if self._keeping is not None:
            with contextlib.suppress(ServerLost, ServerRefused):  # else it would drain them before it ends
                await self.client.abort_all()
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
            self._keeping = None

    async def _start_child(self, live: SglangLive) -> Child:
        port = self.settings.sglang_port or free_port()
        self.client.url = f"http://127.0.0.1:{port}"
        composed = self._compose(live, str(port))
        return await Child.start(composed.arguments, child_environment(os.environ, composed.variables))

    def _compose(self, live: SglangLive, port: str) -> Launch:
        s = self.settings
        folder, serial = (str(live.served.folder), live.serial) if live.begun else ("", 0)
        try:
            composed = launch(
                s,
                live.model,
                folder=folder,
                port=port,
                serial=serial,
                context=live.context,
                queue_limit=s.queue_limit,
            )
        except FlagsRefused as error:
            raise Told("settings of SGLang: " + "; ".join(error.reasons)) from None
        if s.sglang_python:
            return composed
        return Launch((sys.executable, *composed.arguments[1:]), composed.variables)


class _Passed(Collector):
    """SGLang's metrics, as it last told them, beside those of this process."""

    def __init__(self) -> None:
        self._text = ""

    def take(self, text: str) -> None:
        self._text = text

    def collect(self) -> Iterator[Metric]:
        own = ("python_", "process_")
        with contextlib.suppress(ValueError):  # what is no exposition is left out
            for family in text_string_to_metric_families(self._text):
                if not family.name.startswith(own):
                    yield family
