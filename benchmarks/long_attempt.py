"""An attempt of 200,000 tokens with its routing, for the console's page of it. No main: `benchmarks.console` opens it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import which
from typing import Any

import msgspec
import numpy as np

from shared.contracts import messages as m
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.ids import attempt_prefix
from shared.contracts.run import Ref, RunConfig
from shared.contracts.trajectory import Segment, Span, Trajectory, pack, pack_routing
from shared.objects import Objects
from shared.renderers.registry import load_renderer
from shared.weights.checkpoint_objects import upload_directory

TOKENS, TURNS = 200_000, 200
LAYERS, EXPERTS, K = 8, 128, 8  # of the routing: 12.8 MB, hardly compressible
BASE = Path(__file__).resolve().parent.parent / "etude" / "data" / "base"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TEXT = "def total(values):\n    return sum(value for value in values if value > 0)\n"


def store(objects: Objects, run: str, like: m.RolloutScored) -> m.RolloutScored:
    """Everything that the page reads: configuration, chat format, trajectory, routing, verdict. Returns the attempt's score."""
    nothing = Ref(key="none", size=0, checksum="")
    base = upload_directory(objects, f"runs/{run}/base", BASE)
    config = RunConfig(run=run, base=base, pack=nothing, pack_hidden=nothing)
    objects.put(f"runs/{run}/config.json", msgspec.json.encode(config))
    key = m.AttemptKey(attempt="a-long", epoch=1, group="g-long", problem="p-long")
    random = np.random.default_rng(1)
    prefix = attempt_prefix(run, key.attempt, key.epoch)
    rows = random.integers(0, EXPERTS, (TOKENS - 1, LAYERS, K), dtype=np.uint8)
    trajectory = Trajectory(
        key=key,
        stop=like.stop,
        temperature=1.0,
        effort=like.effort,
        segments=[_segment(np.array(load_renderer(BASE).encode(TEXT), np.int32), random)],
        routing=objects.put(f"{prefix}/routing-0.safetensors.zst", pack_routing([rows])),
    )
    ref = objects.put(f"{prefix}/trajectory-0.safetensors.zst", pack(trajectory))
    objects.put(verdict_key(run, key, ref), msgspec.json.encode(Graded(verdict=like.verdict)))
    return msgspec.structs.replace(like, run=run, key=key, trajectory=ref)


def _segment(text: np.ndarray, random: np.random.Generator) -> Segment:
    """Turns that alternate between what a tool said and what was sampled."""
    size = TOKENS // TURNS
    sampled = np.arange(TOKENS) // size % 2 == 1
    return Segment(
        tokens=np.resize(text, TOKENS),
        loss_mask=sampled,
        logprobs=np.where(sampled, -random.exponential(1.0, TOKENS), 0).astype(np.float32),
        versions=np.where(sampled, 3, -1).astype(np.int32),
        oldest_kv_version=3,
        spans=[
            Span(start=i * size, end=(i + 1) * size, role="tool_call" if i % 2 else "tool_output", turn=i // 2)
            for i in range(TURNS)
        ],
    )


@asynccontextmanager
async def browser() -> AsyncIterator[Callable[[str], Awaitable[float]] | None]:
    """Opens an address and returns the milliseconds from the request to `DOMContentLoaded`. None: there is no Chromium here, or
    no Playwright."""
    path = next(filter(None, map(which, BROWSERS)), None)
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        path = None
    if path is None:
        yield None
        return
    async with async_playwright() as driver:
        # Root needs --no-sandbox; the page is our own.
        chromium: Any = await driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = await chromium.new_page()

        async def opened(address: str) -> float:
            await page.goto(address, wait_until="domcontentloaded")
            spent = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
            return float(await page.evaluate(spent))

        yield opened
        await chromium.close()
