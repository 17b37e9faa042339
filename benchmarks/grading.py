"""Grading: verdicts a second, waiting in the queue, what repositories cost beyond pytest, what each behaviour term costs.

Functions are graded as in a run: jobs through Redis (SQLite, the embedded queue, beside it), two grader processes with one
bubblewrap sandbox each, every behaviour term that needs no tokenizer. Redis is a process of this benchmark's own. The load is
open: attempts arrive at random at a share of the measured throughput, and a wait lasts from handing over an attempt to its
verdict. A repository's grading is compared with the same tests by pytest alone, in the same Python without a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np

from benchmarks.records import Bench, record
from infra.servers import Unavailable, debian
from services.reward.graders import CeleryJobs, Graders
from services.reward.jobs import Item
from services.reward.term_worker import prepare
from shared import objects as stores
from shared import terms
from shared.contracts.messages import AttemptKey, Effort, StopReason, Verdict
from shared.contracts.run import Ref
from shared.contracts.trajectory import Change, Segment, Span, Submission, Trajectory, pack
from shared.environments import Grading
from shared.objects import Objects
from shared.problems.pack import write
from shared.settings import ServiceSettings
from shared.telemetry import Health
from shared.terms import Made, Seen, Turn
from tests.guard.problems import fixed
from tests.laboratory import FILES, Laboratory, hidden

GRADERS = 2  # as many as the cores of the smallest machine
PARTS = ("functions", "repository", "terms")
RUN = "benchmark"


def trajectory(
    key: AttemptKey, files: dict[str, str] | None = None, changes: dict[str, Change] | None = None
) -> Trajectory:
    """Return an attempt of 20 turns."""
    turns, width = 20, 64
    count = turns * width
    spans = [
        Span(start=i * width, end=i * width + 32, role="tool_call", tool=("read", "edit", "test")[i % 3], turn=i + 1)
        for i in range(turns)
    ]
    segment = Segment(
        tokens=np.arange(count, dtype=np.int32),
        loss_mask=np.arange(count) % width < 32,
        logprobs=np.zeros(count, dtype=np.float32),
        versions=np.where(np.arange(count) % width < 32, 0, -1).astype(np.int32),
        oldest_kv_version=0,
        spans=spans,
    )
    return Trajectory(
        key=key, stop=StopReason.submitted, temperature=1.0, effort=Effort(tool_calls=turns), segments=[segment],
        files=files or {}, changes=changes or {},
    )  # fmt: skip


class Attempts:
    """Attempts at the fixed problems, stored as rollout workers store them."""

    def __init__(self, objects: Objects, count: int) -> None:
        pairs = fixed()
        packs = objects.put("pack", write([p for p, _ in pairs])), objects.put("hidden", write([h for _, h in pairs]))
        self.items = [self._item(objects, i, pairs[i % len(pairs)], packs) for i in range(count)]

    def _item(self, objects: Objects, number: int, pair: tuple, packs: tuple[Ref, Ref]) -> Item:
        problem, secret = pair
        key = AttemptKey(attempt=f"a{number}", epoch=0, group=f"g{number // 8}", problem=problem.id)
        source = {**problem.files, **secret.solution} if number % 2 else problem.files
        ref = objects.put(f"t/{number}", pack(trajectory(key, dict(source))))
        return Item(run=RUN, key=key, trajectory=ref, pack=packs[0], pack_hidden=packs[1])


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """Start a Redis of our own, and end it. Raises Unavailable."""
    path = debian.program("redis-server", "redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            str(path),
            "--bind",
            "127.0.0.1",
            "--port",
            str(port),
            "--dir",
            folder,
            "--appendonly",
            "yes",
            "--save",
            "",
        ]
        process = subprocess.Popen(argv, env={**os.environ, **debian.libraries(path)}, stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()
            process.wait()


def started(state: Path, jobs: str) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "ETUDE_STATE": str(state), "ETUDE_GRADER_SANDBOXES": "1", "ETUDE_JOBS": jobs}
    argv = [sys.executable, "-m", "services.reward.grader"]
    with (state / "graders.log").open("ab") as log:
        return [
            subprocess.Popen(argv, env={**environment, "ETUDE_NAME": f"g{number}"}, stderr=log)
            for number in range(GRADERS)
        ]


@contextlib.asynccontextmanager
async def graders(state: Path, jobs: str) -> AsyncIterator[Graders]:
    """Start the graders, and the half of the reward service that talks to them, with the service's own settings."""
    settings, processes = ServiceSettings(state=state, jobs=jobs), started(state, jobs)
    celery = CeleryJobs(settings.jobs_url)
    try:
        async with Graders(
            celery, stores.connect(settings.objects_url), Health("reward", settings),
            batch=32, linger_s=0.3, patience_s=120.0, tries=4,
        ) as one:  # fmt: skip
            yield one
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
        await celery.close()


async def throughput(one: Graders, items: list[Item]) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(one.grade(item) for item in items))
    return len(items) / (time.perf_counter() - started)


async def waits(one: Graders, items: list[Item], rate: float) -> list[float]:
    """Return the milliseconds that each attempt waits where they arrive at random, `rate` a second."""
    chance = random.Random(0)

    async def timed(item: Item) -> float:
        started = time.perf_counter()
        await one.grade(item)
        return (time.perf_counter() - started) * 1e3

    at, began, tasks = 0.0, time.perf_counter(), []
    for item in items:
        at += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(timed(item)))
    return list(await asyncio.gather(*tasks))


async def functions(bench: Bench, jobs: str, name: str, *, loads: bool) -> None:
    """Measure one queue. `jobs`: the empty string: the embedded one."""
    batch, repeats = bench.pick(1500, 200), bench.pick(5, 2)
    seconds = bench.pick(20.0, 4.0)
    with tempfile.TemporaryDirectory(prefix="etude-grading-") as folder:
        state = Path(folder)
        objects = stores.connect(ServiceSettings(state=state).objects_url)
        attempts = iter(Attempts(objects, batch * (repeats + 6) + 200).items)

        def some(count: int) -> list[Item]:
            return [item for item, _ in zip(attempts, range(count), strict=False)]

        async with graders(state, jobs) as one:
            await throughput(one, some(100))  # sandboxes and term workers start
            rates = [await throughput(one, some(batch)) for _ in range(repeats)]
            ident = "grading.function_per_s" if name == "redis" else f"grading.function_{name}_per_s"
            what = f"function grades in bubblewrap through {name}, {GRADERS} graders, {os.cpu_count()} cores"
            bench.add(
                record(ident, what, rates, "1/s", "at least 150" if name == "redis" else "grading.function_per_s")
            )
            rate = statistics.median(rates)
            for load in (0.5, 0.95) if loads else ():
                found = sorted(await waits(one, some(min(int(seconds * load * rate), 2 * batch)), load * rate))
                for part in (50, 99):
                    value = found[min(len(found) - 1, len(found) * part // 100)]
                    what = f"wait for a function's verdict at {load:.0%} load, percentile {part}, {len(found)} attempts"
                    bench.add(record(f"grading.queue_{load * 100:.0f}_p{part}_ms", what, [value], "ms"))


# A suite of so many tests; each computes for some 40 ms.
SUITE = """import pytest
from calc import add


@pytest.mark.parametrize("number", range({count}))
def test_slow(number):
    assert sum(add(i, 1) for i in range(500_000)) > number
"""


def repository(bench: Bench) -> None:
    count = bench.pick(150, 30)
    tests = SUITE.format(count=count)
    names = [f"tests/test_slow.py::test_slow[{number}]" for number in range(count)]
    secret = hidden(fail_to_pass=names[:1], pass_to_pass=names[1:], tests={"tests/test_slow.py": Change(text=tests)})
    bare, graded = [], []
    with tempfile.TemporaryDirectory(prefix="etude-grading-") as folder:
        lab = Laboratory(Path(folder))
        grading = Grading(lab.problem(), secret, Submission(changes=hidden().solution))
        tree = Path(folder, "tree")
        for path, text in {
            **FILES,
            **{p: c.text for p, c in hidden().solution.items()},
            "tests/test_slow.py": tests,
        }.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(str(text))
        for number in range(1 + bench.pick(5, 2)):  # the first of each fills caches
            bare.append(_seconds_of_pytest(tree))
            started = time.perf_counter()
            [verdict] = asyncio.run(lab.environment.grade([grading]))
            graded.append(time.perf_counter() - started)
            if not (isinstance(verdict, Verdict) and verdict.solved):
                raise SystemExit(f"grading: the repository's solution got {verdict}; expected that it passes")
            if number == 0:
                bare, graded = [], []
    over = [(g / b - 1.0) * 100.0 for g, b in zip(graded, bare, strict=True)]
    what = f"grading of a repository over pytest alone, a suite of {statistics.median(bare):.1f} s"
    bench.add(record("grading.repository_overhead", what, over, "%", "at most 15 %"))
    fixed_cost = [g - b for g, b in zip(graded, bare, strict=True)]
    bench.add(record("grading.repository_added_s", "the same in seconds: sandbox, trees, canaries", fixed_cost, "s"))


def _seconds_of_pytest(tree: Path) -> float:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(tree)}
    started = time.perf_counter()
    subprocess.run([*argv, "--rootdir", str(tree)], cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def attempt(number: int, source: str) -> Seen:
    """Return an attempt that changed two Python files of a tree, as no other one did."""
    lines = source.splitlines()
    at = 7 * number % (len(lines) - 2)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines.insert(at, f"{indent}# maybe {number} is enough")
    after = "\n".join(lines) + "\n"
    changes = {"src/one.py": Change(text=after), "src/two.py": Change(text=f"import os\nvalue = {number}\n")}
    made = trajectory(AttemptKey(attempt=f"a{number}", epoch=0, group="g", problem="p"), changes=changes)
    said = ("I read the file to see what it does.", "I change it.", "All tests pass now.")
    calls = (("read", "reads"), ("edit", "changes"), ("test", "tests"))
    turns = tuple(
        Turn(i + 1, said[i % 3], (Made(i + 1, *calls[i % 3], {"path": f"src/file{i}.py"}, True, ""),), "line\n" * 100)
        for i in range(20)
    )
    effects = dict(calls)
    return Seen(made, {"src/one.py": source}, effects, "Mend src/one.py.", lambda: turns)


def term_costs(bench: Bench) -> None:
    from services.reward import graders as a_module

    source = Path(a_module.__file__).read_text()
    slowest = 0.0
    for name in terms.names():
        if name == "judge":
            continue
        term, costs = terms.load(name), []
        prepare(name)
        term(attempt(10_000, source))
        for number in range(bench.pick(200, 40)):
            seen = attempt(number, source)
            started = time.perf_counter()
            term(seen)
            costs.append((time.perf_counter() - started) * 1e3)
        median = statistics.median(costs)
        slowest = max(slowest, median)
        bench.add(
            record(f"grading.term_{name}_ms", f"the term {name} on one attempt, median", [median], "ms", "at most 1")
        )
    bench.add(record("grading.term_ms", "the slowest term on one attempt, median", [slowest], "ms", "at most 1"))


def main() -> None:
    bench = Bench.start(__doc__, parts=PARTS)
    if bench.wants("terms"):
        term_costs(bench)
    if bench.wants("repository"):
        repository(bench)
    if bench.wants("functions"):
        try:
            with redis() as jobs:
                asyncio.run(functions(bench, jobs, "redis", loads=True))
        except Unavailable as error:
            print(f"grading.function_per_s: not measured: {error}")
        asyncio.run(functions(bench, "", "sqlite", loads=False))
    bench.end()


if __name__ == "__main__":
    main()
