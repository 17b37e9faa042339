"""Versions into SGLang: written as a folder while it samples, loaded while it stands still, verified before it goes on.

One version is served at any time, by folder, bits and hashes: what a new process starts with, and what a load that failed
goes back to. SGLang's own way back is none: it reads the new folder again.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.inference.config import InferenceSettings
from services.inference.live import Bits
from services.inference.sglang import files, hashes, metrics
from services.inference.sglang.attached import objections
from services.inference.sglang.client import Client, ServerLost, ServerRefused
from services.inference.sglang.flags import overlap_lag
from services.inference.sglang.layout import Layout, differences, expected
from services.inference.sglang.server import Server
from shared.model.config import ModelConfig
from shared.weights import WeightsDamaged, WeightsError, checksum

CONTROL_S = 60.0  # pausing and going on: a step in hand is finished first
SHOWN = 5  # tensors that an error names
HASH_THREADS = max(1, min(16, (os.cpu_count() or 1) // 2))  # SGLang schedules on the same machine, and must not wait

log = structlog.get_logger()


class LoadFailed(WeightsError):
    """SGLang did not take a version; the text says what it said."""


@dataclass(frozen=True, slots=True)
class Served:
    """A version, ready to be loaded. `hashes`: of every parameter, by rank, as SGLang must report them."""

    serial: int
    bits: Bits
    checksum: str
    folder: Path
    hashes: list[dict[str, str]]


class SglangLive:
    """Implements services.inference.live.Live. `root` is a folder of its own."""

    def __init__(
        self, settings: InferenceSettings, model: ModelConfig, context: int, client: Client, root: Path
    ) -> None:
        self.settings, self.model, self.context, self._client, self.root = settings, model, context, client, root
        self.server: Server | None = None
        self.lag, self.flushes = overlap_lag(settings), settings.flush_on_swap
        self.lineage = secrets.token_hex(
            8
        )  # of one run on one base: no other start of an engine finds its cache entries
        self._served: Served | None = None
        self.still = asyncio.Lock()  # held by who makes the server stand still or go on, until that is done
        self._guard = asyncio.Lock()
        self._writing, self._stopped = threading.Lock(), False
        self._loading: asyncio.Task[float] | None = None

    @property
    def served(self) -> Served:
        assert self._served is not None, "begin first"
        return self._served

    @property
    def serial(self) -> int:
        return self.served.serial

    @property
    def bits(self) -> Bits:
        return self.served.bits

    async def begin(self, serial: int, bits: Bits) -> None:
        """What the server is to be started with."""
        self._served = await asyncio.to_thread(self._prepare, serial, bits, checksum(bits))

    async def load(self, serial: int, bits: Bits, expected: str) -> float:
        """Goes on when its caller is cancelled: half way SGLang would stand still, and running requests would never end."""
        self._loading = asyncio.create_task(self._load(serial, bits, expected))
        return await asyncio.shield(self._loading)

    async def _load(self, serial: int, bits: Bits, expected: str) -> float:
        async with self._guard:
            new = await asyncio.to_thread(self._prepare, serial, bits, expected)
            old = self.served
            try:
                assert self.server is not None
                await self.server.wait_up(self.settings.sglang_start_s)
                pause = await self._exchange(new)
            except (ServerLost, ServerRefused) as error:
                raise LoadFailed(f"serial {serial}: {error}") from None
            finally:
                gone = old if self.served is new else new
                await asyncio.to_thread(shutil.rmtree, gone.folder, True)
            return pause

    async def checksum(self) -> tuple[int, str]:
        async with self._guard:
            try:
                await self._verify(self.served)
            except (ServerLost, ServerRefused) as error:
                raise WeightsError(f"serial {self.serial}: {error}") from None
            return self.serial, self.served.checksum

    async def stop(self) -> None:
        """The server is the engine's to end, before; here go the folders, and what is being written is not left behind."""
        if self._loading is not None and not self._loading.done():
            self._loading.cancel()
            await asyncio.wait({self._loading})
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        with self._writing:
            self._stopped = True
            shutil.rmtree(self.root, True)

    async def check(self) -> None:
        """After each start of the server. Raises WeightsDamaged, ServerLost, ServerRefused."""
        if self.settings.sglang_url:  # whatever it serves: it shall serve this
            odd = list(objections(await self._client.server_info(), self.settings, self.model, self.context))
            if odd:
                raise ServerRefused(
                    f"the server at {self._client.url} was started with {'; '.join(odd)}. Start it with what "
                    "`etude inference flags` prints"
                )
            async with self.still:
                await self._client.pause("retract" if self.flushes else "in_place", CONTROL_S)
                await self._client.settle(CONTROL_S)
                await self._update(self.served)
                await self._verify(self.served)
                await self._client.proceed(CONTROL_S)
        else:
            await self._verify(self.served)

    def _prepare(self, serial: int, bits: Bits, expected_checksum: str) -> Served:
        """Blocking, while the engine samples. Raises WeightsDamaged where names or shapes are not the model's."""
        s, found = self.settings, checksum(bits)
        if found != expected_checksum:
            raise WeightsDamaged(f"serial {serial}: the rebuilt tensors hash to {found}, expected {expected_checksum}")
        fp8, draft = s.sglang_quantization == "fp8", s.sglang_draft_steps > 0
        layout = Layout(self.model, tp=s.sglang_tp, ep=s.sglang_ep, float32=s.sglang_dtype == "float32", draft=draft)
        digest = hashes.on_cpu if s.sglang_device == "cpu" else hashes.on_gpu
        try:
            wanted = expected(files.served(bits, fp8=fp8), layout, digest, HASH_THREADS)
        except KeyError as error:
            raise WeightsDamaged(f"serial {serial}: tensor {error} is missing") from None
        folder = self.root / str(serial)
        if self._served is not None and folder == self._served.folder:
            folder = self.root / f"{serial}-again"
        config = files.engine_config(self.model, context=self.context, dtype=s.sglang_dtype, fp8=fp8)
        with self._writing:  # a thread goes on when its task was cancelled
            if not self._stopped:
                files.write(folder, bits, self.model, config, fp8=fp8, draft=draft)
        return Served(serial, bits, found, folder, wanted)

    async def _exchange(self, new: Served) -> float:
        """Returns the pause. Whatever happens, nothing samples that was not verified; a server that somebody has paused
        stays so."""
        assert self.server is not None
        async with self.still:
            started, found = time.perf_counter(), self.server.paused
            self.server.paused = True
            try:
                await self._client.pause("retract" if self.flushes else "in_place", CONTROL_S)
                await self._client.settle(CONTROL_S)
                await self._replace(new, found)
                await self._go_on(found)
            except (ServerLost, ServerRefused) as error:  # it stands still, or nobody knows
                self.server.give_up(f"serial {new.serial}: {error}")
                raise
            finally:
                self.server.paused = found and self.server.up.is_set()  # a new process stands still for nobody
            return time.perf_counter() - started

    async def _update(self, version: Served) -> None:
        limit_s = self.settings.sglang_update_s
        await self._client.update(str(version.folder), version.serial, limit_s, flush=self.flushes)

    async def _go_on(self, paused: bool) -> None:
        if not paused:
            await self._client.proceed(CONTROL_S)

    async def _replace(self, new: Served, paused: bool) -> None:
        """While it stands still. Where it fails, what served before is loaded again and goes on, unless it was `paused`:
        raises WeightsError."""
        try:
            await self._update(new)
            await self._verify(new)
        except (ServerLost, ServerRefused, WeightsError) as error:
            log.warning("load_undone", serial=new.serial, back_to=self.serial, error=str(error)[:500])
            metrics.UNDONE.inc()
            await self._undo(paused)
            raise error if isinstance(error, WeightsError) else LoadFailed(f"serial {new.serial}: {error}") from None
        self._served = new

    async def _undo(self, paused: bool) -> None:
        """Back to what served; by a new process where this one will not."""
        assert self.server is not None
        old = self.served
        try:
            await self._update(old)
            await self._verify(old)
            await self._go_on(paused)
        except (ServerLost, ServerRefused, WeightsError) as error:
            self.server.give_up(f"serial {old.serial} could not be loaded again: {error}")

    async def _verify(self, version: Served) -> None:
        """Raises WeightsDamaged where a live parameter is not what was published."""
        odd = differences(version.hashes, await self._client.checksums(self.settings.sglang_update_s))
        if odd:
            more = f" and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
            raise WeightsDamaged(
                f"serial {version.serial}: SGLang's weights are not the published ones: {', '.join(odd[:SHOWN])}{more}"
            )
