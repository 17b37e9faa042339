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
from services.inference.live import Bits, CannotServe, CannotStart, Facts, Live
from services.inference.published import bits_of
from services.inference.sglang import files
from services.inference.sglang.api import Api
from services.inference.sglang.child import Child, free_port
from services.inference.sglang.client import Client, ServerLost, ServerRefused
from services.inference.sglang.flags import FlagsRefused, Launch, child_environment, launch
from services.inference.sglang.live import Served, SglangLive
from services.inference.sglang.place import Place
from services.inference.sglang.server import STARTS_TOLERATED, Server
from shared.model import load_checkpoint
from shared.model.config import ModelConfig
from shared.telemetry import Health
from shared.weights import WeightsError

GIB = 2**30


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
        checkpoint was read and all that can be known before has nothing against it."""
        model = ModelConfig.load(directory)
        context = self.settings.context or context_of(directory) or model.max_position_embeddings
        self._compose(model, context)
        bits = await asyncio.to_thread(self._read, directory, model)
        assert self._place is not None
        await self._end()
        if self._live is not None:
            await self._live.stop()  # before the next one is written: there may be no room for both
        self._starts += 1
        live = self._live = SglangLive(
            self.settings, model, context, self.client, self._place.folder / str(self._starts)
        )
        try:
            await live.begin(0, bits)
        except (OSError, WeightsError) as error:
            await live.stop()
            raise CannotStart(f"{live.root}: {error}") from None
        await self.client.open()
        start = None if self.settings.sglang_url else lambda: self._start_child(live)
        keeper = Server(self.client, health, start=start, check=live.check, start_s=self.settings.sglang_start_s)
        keeper.scraped = self._passed.take
        live.server, self._directory = keeper, directory
        self._keeper = keeper
        self._keeping = asyncio.create_task(keeper.run())
        if not await self._comes_up(keeper, self._keeping):
            await self._end()
            await live.stop()
            raise CannotStart(f"SGLang did not start, {STARTS_TOLERATED} times: {keeper.why}")
        return live

    def _read(self, directory: Path, model: ModelConfig) -> Bits:
        """The checkpoint's tensors, and a place that has room for them. Blocking. Raises CannotServe."""
        try:
            bits = bits_of(load_checkpoint(directory))
            if self._place is None:
                self._place = Place(self.settings.sglang_folder, self.settings.name)
            fp8, draft = self.settings.sglang_quantization == "fp8", self.settings.sglang_draft_steps > 0
            least, room = files.least_bytes(bits, model, fp8=fp8, draft=draft), self._place.room()
        except (OSError, MemoryError, RuntimeError) as error:  # the last: torch's word for no memory
            raise CannotServe(f"{directory}: {type(error).__name__}: {error}") from None
        if least > room:
            raise CannotServe(
                f"sglang_weights: found {room / GIB:.1f} GiB for versions at {self._place.folder}; allowed: {least / GIB:.1f} GiB "
                "and more for a version of this model, twice that to swap"
            )
        return bits

    async def _comes_up(self, keeper: Server, keeping: asyncio.Task[None]) -> bool:
        """False: it did not, time and again."""
        up, failing = (asyncio.create_task(event.wait()) for event in (keeper.up, keeper.failing))
        try:
            await asyncio.wait({keeping, up, failing}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            return up.done()
        finally:
            up.cancel()
            failing.cancel()

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
            self._keeping = self._keeper = None

    async def _start_child(self, live: SglangLive) -> Child:
        port = self.settings.sglang_port or free_port()
        self.client.url = f"http://127.0.0.1:{port}"
        composed = self._compose(live.model, live.context, live.served, str(port))
        return await Child.start(composed.arguments, child_environment(os.environ, composed.variables))

    def _compose(self, model: ModelConfig, context: int, served: Served | None = None, port: str = "0") -> Launch:
        """Raises CannotServe where settings and model do not go together."""
        s = self.settings
        try:
            composed = launch(
                s,
                model,
                folder=str(served.folder) if served else "",
                port=port,
                serial=served.serial if served else 0,
                context=context,
                queue_limit=s.queue_limit,
            )
        except FlagsRefused as error:
            raise CannotServe("settings of SGLang: " + "; ".join(error.reasons)) from None
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
