"""The console with many runs: how long a page takes at the 95th percentile, how long it takes to hear of it all, and memory.

1,000 runs of 100 steps with 10 million attempts in all (--quick: 100 runs, 100,000 attempts), over HTTP on this machine. The
page of problems is not among them: the scheduler answers it from its ledger. And one attempt of 200,000 tokens: how long its
page takes, and until a browser has laid it out (where there is a Chromium).

python -m benchmarks.console [--quick] [--only many|long] [--json FILE]
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil

from benchmarks import long_attempt
from benchmarks.records import Bench, record
from services.console import keys
from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.pages import build_app
from services.console.site import Access
from shared.contracts import messages as m
from shared.contracts.life import RunState
from shared.contracts.run import Ref
from shared.objects.directory import DirectoryObjects
from shared.telemetry import Health

STEPS = 100
METRICS = 40  # a step of the trainer names about so many
ASKED = 60  # times each page
NOTHING = Ref(key="none", size=0, checksum="")


def name(run: int) -> str:
    return f"r-2026{1 + run // 2400:02d}{1 + run // 100 % 24:02d}T{run % 100:06d}-abcd"


def scored(run: str, number: int, version: int) -> m.RolloutScored:
    solved = number % 3 == 0
    return m.RolloutScored(
        run=run,
        key=m.AttemptKey(
            attempt=f"a-{number:020d}", epoch=1, group=f"g-{number // 8:018d}", problem=f"p-{number // 8:018d}"
        ),
        verdict=m.Verdict(solved=solved, passed=3 if solved else 1, total=3, error="" if solved else "AssertionError"),
        reward=float(solved),
        terms={"solved": float(solved), "length": -0.01},
        reward_config="default",
        trajectory=NOTHING,
        effort=m.Effort(tool_call_tokens=40, tool_calls=4, turns=4),
        stop=m.StopReason.submitted,
        oldest_version=version,
    )


def said(run: str, attempts: int) -> Iterator[m.RunStatus | m.PolicyPublished | m.RolloutScored | m.StepCommitted]:
    """All that the console hears of one run."""
    yield m.RunStatus(run=run, state=RunState.running, number=1, configs=[NOTHING], started=1.0, since=1.0, by="bench")
    for step in range(STEPS):
        yield m.PolicyPublished(run=run, serial=step, incarnation=0, step=step, parent=step - 1, manifest=NOTHING)
        for number in range(step * attempts // STEPS, (step + 1) * attempts // STEPS):
            yield scored(run, number, step)
        metrics = {f"figure_{i}": step / (i + 1) for i in range(METRICS)}
        groups = {f"g-{step}-{i}": i % 3 for i in range(16)}
        yield m.StepCommitted(run=run, incarnation=0, step=step + 1, serial=step + 1, groups=groups, metrics=metrics)
    over = "the budget is spent"
    yield m.RunStatus(
        run=run, state=RunState.finished, number=2, configs=[NOTHING], started=1.0, since=2.0, reason=over
    )


def filled(bench: Bench, runs: int, attempts: int) -> Board:
    """Raises nothing; the time that applying takes, without making the messages, is one of the figures."""
    process, before, board, spent = psutil.Process(), psutil.Process().memory_info().rss, Board(4000), 0.0
    for run in range(runs):
        messages = list(said(name(run), attempts))
        began = time.perf_counter()
        for message in messages:
            board.apply(message)
        spent += time.perf_counter() - began
    what = f"{runs:,} runs, {runs * attempts:,} attempts"
    bench.add(record("console.apply", f"messages added up, {what}", [runs * attempts / spent], "attempts/s"))
    held = (process.memory_info().rss - before) / 2**20
    bench.add(record("console.memory", f"held for {what}", [held], "MiB"))
    return board


async def ask(board: Board, runs: int) -> dict[str, list[float]]:
    """Milliseconds of each answer, by page."""
    newest, other, oldest = name(runs - 1), name(runs - 2), name(0)
    paths = {
        "overview": "/",
        "overview, last page": "/?page=9999",
        "run": f"/runs/{newest}",
        "old run": f"/runs/{oldest}",
        "attempts": f"/runs/{newest}/attempts?page=40",
        "attempts, filtered": f"/runs/{newest}/attempts?outcome=solved&page=9999",
        "compare": f"/compare?run={newest}&run={other}&run={oldest}",
        "alerts": "/alerts",
    }
    with tempfile.TemporaryDirectory() as folder:
        settings = ConsoleSettings(state=Path(folder))
        library = Library(DirectoryObjects(Path(folder) / "objects"), settings.formats)
        app = build_app(settings, board, library, Access(keys.tokens(settings)[0]))
        times: dict[str, list[float]] = {page: [] for page in paths}
        async with Health("console", settings, app) as health, aiohttp.ClientSession() as http:
            for _ in range(ASKED):
                for page, path in paths.items():
                    began = time.perf_counter()
                    async with http.get(health.url + path) as answer:
                        await answer.read()
                        answer.raise_for_status()
                    times[page].append(1000 * (time.perf_counter() - began))
    return times


def long(bench: Bench) -> None:
    """The page of a long attempt, from its beginning and from its end."""
    with tempfile.TemporaryDirectory() as folder:
        settings, run, board = ConsoleSettings(state=Path(folder)), name(0), Board(10)
        objects = DirectoryObjects(Path(folder) / "objects")
        board.apply(long_attempt.store(objects, run, scored(run, 0, 3)))
        app = build_app(settings, board, Library(objects, settings.formats), Access(keys.tokens(settings)[0]))
        last = long_attempt.TOKENS - 100
        pages = {"beginning": "", "end": f"?token={last}&row={last}"}
        answers: dict[str, list[float]] = {page: [] for page in pages}
        laid_out: dict[str, list[float]] = {page: [] for page in pages}

        async def serve() -> None:
            async with (
                Health("console", settings, app) as health,
                aiohttp.ClientSession() as http,
                long_attempt.browser() as opened,
            ):
                address = f"{health.url}/runs/{run}/attempts/a-long"
                for i in range(1 + bench.pick(10, 3)):
                    for page, query in pages.items():
                        began = time.perf_counter()
                        async with http.get(address + query) as answer:
                            await answer.read()
                            answer.raise_for_status()
                        if i:  # the first has fetched chat format and routing
                            answers[page].append(1000 * (time.perf_counter() - began))
                        if opened and i:
                            laid_out[page].append(await opened(address + query))

        asyncio.run(serve())
    for page in pages:
        what = f"an attempt of {long_attempt.TOKENS:,} tokens, from its {page}"
        bench.add(record(f"console.long.{page}", f"{what}: answered", answers[page], "ms"))
        if laid_out[page]:
            bench.add(record(f"console.laid_out.{page}", f"{what}: DOMContentLoaded", laid_out[page], "ms", "5000 ms"))


def main() -> None:
    bench = Bench.start(__doc__, parts=("many", "long"))
    if bench.wants("many"):
        many(bench)
    if bench.wants("long"):
        long(bench)
    bench.end()


def many(bench: Bench) -> None:
    runs, attempts = bench.pick((1000, 10_000), (100, 1000))
    times = asyncio.run(ask(filled(bench, runs, attempts), runs))
    for page, found in times.items():
        p95 = record(
            f"console.{page}", "a page, 95th percentile", [statistics.quantiles(found, n=20)[-1]], "ms", "500 ms"
        )
        bench.add(dataclasses.replace(p95, repeats=len(found), spread=max(found) - min(found)))


if __name__ == "__main__":
    main()
