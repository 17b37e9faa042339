"""The embedded engine as the service wires it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from services.inference.api import Server
from services.inference.checkpoint import context_of
from services.inference.config import InferenceSettings
from services.inference.engine import Engine
from services.inference.live import CannotServe, Facts, Live
from services.inference.published import bits_of
from services.inference.room import cache_bytes, free_bytes
from services.inference.weights import LiveWeights
from shared.model import ModelConfig, load_checkpoint
from shared.model.fp8 import round_inputs, round_weights
from shared.settings import Told
from shared.telemetry import Health
from shared.weights.low_precision import format_of

GIB = 2**30
CACHE_ROWS = 160  # sessions, where the setting is 0
CACHE_SHARE = 0.25  # of the free memory: a trainer and graders may run on the same machine

log = structlog.get_logger()


class Embedded:
    """Implements services.inference.live.Engine."""

    def __init__(self, settings: InferenceSettings, facts: Facts) -> None:
        self.settings = settings
        self.server = Server(facts)
        self._last: tuple[LiveWeights, Path] | None = None  # what is handed to `serve` next, of which directory

    @property
    def serving(self) -> bool:
        return self.server.engine is not None

    async def start(self, directory: Path, health: Health) -> Live:
        loop = asyncio.get_running_loop()
        live = await asyncio.to_thread(self._build, directory, lambda why: loop.call_soon_threadsafe(self._break, why))
        self._last = live, directory
        cache = live.engine.cache
        log.info(
            "engine_started",
            directory=str(directory),
            positions=cache.positions,
            rows=cache.rows,
            device=str(cache.keys.device),
        )
        return live

    def _break(self, why: str) -> None:
        self.server.broken_by = why
        self.server.broken.set()

    def _build(self, directory: Path, failed: Callable[[str], object]) -> LiveWeights:
        s = self.settings
        device = s.engine_device if s.engine_device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        config = ModelConfig.load(directory)
        positions = s.context or context_of(directory) or config.max_position_embeddings
        rows = self._rows(config, positions, device)
        try:
            return self._built(directory, rows, positions, device, failed)
        except (MemoryError, RuntimeError) as error:  # torch's word for no memory, too
            log.warning("engine_not_built", directory=str(directory), exc_info=True)
            if device != "cpu" and self.server.engine is not None:
                # Beside the engine that serves there is no room; a new process has it, and begins with the run started last.
                raise Told(
                    f"{directory}: on {device}, beside the engine that serves: {error}; this process ends"
                ) from None
            raise CannotServe(f"{directory}: on {device}: {error}") from None

    def _rows(self, config: ModelConfig, positions: int, device: str) -> int:
        """Return how many sessions the cache holds. The cache of another run's engine counts as free: it goes when this one
        serves. Raises CannotServe."""
        s = self.settings
        wanted = s.cache_rows or CACHE_ROWS
        row = cache_bytes(
            config, 1, positions, mtp=s.draft_tokens > 0, bytes_each=getattr(torch, s.engine_dtype).itemsize
        )
        free = free_bytes(device)
        if self.server.engine is not None:
            cache = self.server.engine.cache
            free += cache.keys.nbytes + cache.values.nbytes
        if not s.cache_rows and (fitting := int(free * CACHE_SHARE) // row):
            return min(wanted, fitting)
        if wanted * row > free:
            raise CannotServe(
                f"cache_rows: found {wanted} rows of {positions} positions (context), which take "
                f"{wanted * row / GIB:.1f} GiB; allowed: what fits the {free / GIB:.1f} GiB that are free on {device}, "
                f"{free // row} rows of so many positions, or a smaller context"
            )
        return wanted

    def _built(
        self, directory: Path, rows: int, positions: int, device: str, failed: Callable[[str], object]
    ) -> LiveWeights:
        s = self.settings
        model = load_checkpoint(directory, getattr(torch, s.engine_dtype)).eval().requires_grad_(False)
        model = model.to(device)
        bits = bits_of(model)
        if format := format_of(s.fp8):
            round_weights(model, format)
            round_inputs(model, format)
        engine = Engine(
            model,
            serial=0,
            rows=rows,
            positions=positions,
            prefill_tokens=s.prefill_tokens,
            queue_limit=s.queue_limit,
            draft_tokens=s.draft_tokens,
            threads=s.engine_threads,
            failed=failed,
        )
        live = LiveWeights(engine, bits)
        engine.start()
        return live

    def serve(self, live: Live) -> None:
        assert isinstance(live, LiveWeights)
        assert self._last is not None
        self.server.engine, self.server.directory = live.engine, self._last[1]

    async def close(self) -> None:
        if self.server.engine is not None:
            await asyncio.to_thread(self.server.engine.stop)
        if self._last is not None:  # perhaps never served
            await self._last[0].stop()
