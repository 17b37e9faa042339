"""Swapping weights while they sample: how long sampling stands still in the embedded engine, in our SGLang replica, and for
SGLang's own update_weights_from_disk.

One model (the shipped base policy), the same versions (real AdamW steps), the same requests in flight, one run, one thread
each; the real SGLang on the CPU (`infra.sglang_cpu`, installed where it is not there yet; where it cannot be had its rows
are left out). What is timed:

- embedded: the pause as the replica announces it, and the checksum of the live weights, as if it had stood still for that
  as well (it does not: the copy is verified before it takes over);
- SGLang's own: that one call alone, its server paused in place, the folder written before;
- our SGLang replica: that call between pause and continue, every live parameter hashed by SGLang and compared.

`swap.growth`: what the embedded engine's process holds after 500 swaps under the same load, beyond what it held after fifty.

Requests keep running throughout; the run fails where one of them is lost, or none of them ran over a swap.

python -m benchmarks.swap [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch

from benchmarks.policies import BASE, Tensors, adamw_steps
from benchmarks.records import Bench, record
from infra import sglang_cpu
from services.inference.config import InferenceSettings
from services.inference.embedded import Embedded
from services.inference.live import Engine, Facts, Live
from services.inference.sglang import files
from services.inference.sglang.kind import Sglang
from services.inference.sglang.live import CONTROL_S
from shared.model import ModelConfig
from shared.telemetry import Health
from shared.weights import checksum

IN_FLIGHT = 8  # requests
PROMPT, NEW = list(range(8, 24)), 400


@contextlib.asynccontextmanager
async def serving(engine: Engine, health: Health) -> AsyncIterator[Live]:
    """The base, sampling behind HTTP."""
    try:
        async with health:
            live = await engine.start(BASE, health)
            engine.serve(live)
            yield live
    finally:
        await engine.close()


async def under_load(url: str, work: Callable[[], Awaitable[None]]) -> int:
    """`work` while IN_FLIGHT requests run, each followed by another. Returns how many ran over a swap."""
    over, done = 0, asyncio.Event()

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal over
        body = {"input_ids": PROMPT, "sampling_params": {"temperature": 1.0, "max_new_tokens": NEW}}
        while not done.is_set():
            async with session.post(f"{url}/generate", json=body) as response:
                answer = await response.json()
            if response.status != 200 or len(answer["output_ids"]) != NEW:
                raise RuntimeError(f"a request was lost: HTTP {response.status}: {str(answer)[:300]}")
            over += len(answer["meta_info"]["weight_versions"]) > 1

    async def measured() -> None:
        await asyncio.sleep(0.5)  # until they run
        try:
            await work()
        finally:
            done.set()

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(client(session))
        group.create_task(measured())
    if not over:
        raise RuntimeError("no request ran over a swap")
    return over


async def embedded(settings: InferenceSettings, versions: list[Tensors]) -> tuple[list[float], list[float], int]:
    """Seconds of the pauses, of the checksums, and how many requests ran over a swap."""
    engine, pauses, checks = Embedded(settings, FACTS), [], []
    health = Health("inference", settings, engine.server.app)

    async with serving(engine, health) as live:

        async def swaps() -> None:
            for serial, bits in enumerate(versions, 1):
                pauses.append(await live.load(serial, bits, checksum(bits)))
                began = time.perf_counter()
                await live.checksum()
                checks.append(time.perf_counter() - began)

        return pauses, checks, await under_load(health.url, swaps)


async def many(settings: InferenceSettings, versions: list[Tensors], times: int) -> tuple[float, int]:
    """Growth of this process's memory over so many swaps, the first tenth left out, as a share; requests that ran over a swap."""
    engine, held = Embedded(settings, FACTS), []
    health, known = Health("inference", settings, engine.server.app), [checksum(bits) for bits in versions]

    async with serving(engine, health) as live:

        async def swaps() -> None:
            for number in range(times):
                which = number % len(versions)
                await live.load(number + 1, versions[which], known[which])
                if number + 1 in (times // 10, times):
                    held.append(psutil.Process().memory_info().rss)

        over = await under_load(health.url, swaps)
    return held[1] / held[0] - 1, over


async def sglang(settings: InferenceSettings, versions: list[Tensors]) -> tuple[list[float], list[float], int]:
    """Seconds of SGLang's own updates, of our replica's pauses, and how many requests ran over one of them."""
    engine, own, pauses = Sglang(settings, FACTS), [], []
    health = Health("inference", settings, engine.server.app)
    model = ModelConfig.load(BASE)

    async with serving(engine, health) as live:
        client = engine.client
        config = files.engine_config(model, context=live.context, dtype="float32", fp8=False)

        async def swaps() -> None:
            for number, bits in enumerate(versions):
                serial, folder = 2 * number + 1, settings.state / "own" / str(number)
                files.write(folder, bits, model, config, fp8=False, draft=False)
                await client.pause("in_place", CONTROL_S)
                await client.settle(CONTROL_S)
                began = time.perf_counter()
                await client.update(str(folder), serial, settings.sglang_update_s, flush=False)
                own.append(time.perf_counter() - began)
                await client.proceed(CONTROL_S)
                pauses.append(await live.load(serial + 1, bits, checksum(bits)))

        return own, pauses, await under_load(health.url, swaps)


async def _never(*_: Any) -> dict[str, Any]:
    raise AssertionError("nobody asks this")


FACTS = Facts(describe=dict, pin=_never, checksums=_never, update=_never)


def main() -> None:
    bench = Bench.start(__doc__)
    torch.set_num_threads(1)
    versions = list(islice(adamw_steps(3e-4), 1, bench.pick(12, 4) + 1))
    load = f"{IN_FLIGHT} requests in flight, none lost"

    def add(id: str, what: str, seconds: list[float], over: int) -> None:
        told = f"{over} requests ran over a swap"
        bench.add(record(f"swap.{id}", f"{what}, {load}", [x * 1e3 for x in seconds], "ms", told))

    with tempfile.TemporaryDirectory() as folder:
        settings = InferenceSettings(state=Path(folder))
        pauses, checks, over = asyncio.run(embedded(settings, versions))
        add("pause", "embedded engine: pause", pauses, over)
        add("checksum", "embedded engine: checksum of the live weights", checks, over)
        times = bench.pick(500, 50)
        growth, over = asyncio.run(many(settings, versions, times))
        what = f"memory after {times} swaps / after the first tenth, less 1; {load}"
        told = f"{over} requests ran over a swap; wanted: below 0.05"
        bench.add(record("swap.growth", what, [growth], "x", told))
        try:
            changes = {"sglang_python": str(sglang_cpu.install()), "sglang_device": "cpu", "sglang_dtype": "float32"}
        except sglang_cpu.CannotInstall as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            own, replica, over = asyncio.run(sglang(settings.model_copy(update=changes), versions))
            add("sglang_update", "SGLang's own update_weights_from_disk", own, over)
            add("sglang_replica", "our SGLang replica: pause, load, every hash, continue", replica, over)
            theirs = statistics.median(own)
            ratios = [(pause + check) / theirs for pause, check in zip(pauses, checks, strict=True)]
            what = "embedded engine's pause and checksum / SGLang's own update"
            bench.add(record("swap.pause_vs_sglang", what, ratios, "x", f"{theirs * 1e3:.0f} ms; wanted: at most 1/3"))
    bench.end()


if __name__ == "__main__":
    main()
