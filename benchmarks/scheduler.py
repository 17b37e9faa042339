"""What choosing the next problem costs, from ten thousand to ten million problems, and what a batch of messages costs then.

Each size has a ledger (SQLite) with 260 categories and groups of ten relatives, of which the hardness estimate knows nearly
ten thousand: the sampler has ten thousand cells. Each measurement is of a process of its own. Times are processor time, so
that other work on the machine does not count. `start`: from the ledger to the first problem drawn. `rss`: the greatest of that
process, through start, draws and batches. A batch is what the scheduler's desk does with up to 256 messages of workers,
graders, trainer and engine, with its commit: its p99 is of processor time too, and once more by the clock.

Beside it, the same draws by `numpy.random.Generator.choice`, weighted, over all that is free, and from a heap of an
exponential race, where a change of one problem's weight is one push.

`--json F` also draws the growth: F with the suffix .png.
"""

from __future__ import annotations

import heapq
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import Bench, record
from services.scheduler.catalogue import Catalogue
from services.scheduler.desk import Desk
from services.scheduler.hardness import MAX_CELLS, Hardness, Outcome
from services.scheduler.records import Head
from services.scheduler.rows import TABLES, head_row
from services.scheduler.sampler import Sampler
from services.scheduler.store import Store
from shared import ledger
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.life import RunState
from shared.contracts.run import Ref, RunConfig, ScheduleConfig

RUN = "r-bench"
REF = Ref(key="k", size=1, checksum="c" * 32)
CATEGORIES = [f"debugging/kind-{i % 26:02}/surprise-{i // 26}" for i in range(260)]
RELATIVES = 10  # problems of a cell
PICKS, QUICK_PICKS = 300_000, 20_000
BATCHES, QUICK_BATCHES = 400, 60
CHOICES = 5  # of numpy: each goes through all
SIZES, QUICK_SIZES = (10_000, 100_000, 1_000_000, 10_000_000), (10_000, 100_000)
PER_INSERT = 50_000
CONFIG = RunConfig(
    run=RUN, base=REF, pack=REF, pack_hidden=REF, schedule=ScheduleConfig(group_size=8, groups_per_step=16)
)


def problem(i: int) -> tuple[str, str, str]:
    """(id, category, cell)."""
    return f"package-{i // 1000:05}.module.function:{i:08}", CATEGORIES[i * 7 % 260], f"function-{i // RELATIVES:07}"


def write_ledger(path: Path, size: int) -> None:
    """A run that is asking for attempts, with so many problems."""
    engine = ledger.connect(f"sqlite:///{path}")
    ledger.upgrade(engine)
    head = Head(RUN, state=RunState.running, config=REF, incarnation=0, created_at=1.0)
    columns = "run_id, problem_id, pack_hash, category, cell, admitted_at"
    insert = f"INSERT INTO problems ({columns}) VALUES ('{RUN}', ?, 'pack', ?, ?, 1.0)"
    with engine.begin() as connection:
        connection.execute(TABLES["runs"].insert(), [head_row(head)])
        connection.execute(
            TABLES["packs"].insert(), [{"run_id": RUN, "pack_hash": "pack", "pack": REF, "pack_hidden": REF}]
        )
        for first in range(0, size, PER_INSERT):
            some = range(first, min(size, first + PER_INSERT))
            connection.exec_driver_sql(insert, [problem(i) for i in some])
    engine.dispose()


def rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rate(times: int, one: Callable[[int], Any]) -> float:
    """Calls a second of processor time; `one` takes the number of the call."""
    started = time.process_time()
    for i in range(times):
        one(i)
    return times / (time.process_time() - started)


def practise(estimates: Hardness, size: int) -> int:
    """Have results come of as many cells as are kept. Returns how many."""
    chance, cells = random.Random(1), min(MAX_CELLS - len(CATEGORIES), size // RELATIVES)
    for i in range(cells):
        _, category, cell = problem(i * RELATIVES)
        estimates.observe(Outcome(category, cell, 8, chance.randint(0, 8), chance.uniform(1, 8), 40.0, i // 256))
    return cells


def ours(path: Path, size: int, picks: int, batches: int) -> dict[str, list[float]]:
    """What our sampler costs with this ledger, by what was measured."""
    engine = ledger.connect(f"sqlite:///{path}")
    began = time.process_time()
    ws = Store(engine).load(RUN, 1.0)
    assert ws is not None
    ws.catalogue.draw(ws.hardness, 1, step=0, seed=0, number=1)
    found = {"start_s": [time.process_time() - began]}
    practise(ws.hardness, size)
    found |= _sampled(ws.catalogue, ws.hardness, size, picks)
    del ws
    cpu_ms, wall_ms = batch_ms(Desk(Store(engine), lambda ref: CONFIG), batches)
    found["batch_p99_ms"] = [float(np.quantile(cpu_ms, 0.99))]
    found["batch_median_ms"] = [float(np.median(cpu_ms))]
    found["batch_clock_p99_ms"] = [float(np.quantile(wall_ms, 0.99))]
    found["rss_mb"] = [rss_mb()]
    return found


def _sampled(catalogue: Catalogue, estimates: Hardness, size: int, picks: int) -> dict[str, list[float]]:
    began = time.process_time()
    catalogue.draw(estimates, 1, step=40, seed=0, number=2)
    found = {"practised_s": [time.process_time() - began]}
    found["weights_ms"] = [1000 * _reweighed_s(catalogue, estimates, i) for i in range(5)]
    picks = min(picks, size // 4)
    numbers = iter(range(100, 1 << 30))
    catalogue.draw(estimates, 1, step=50, seed=0, number=99)

    def one(_: int) -> None:
        catalogue.draw(estimates, 1, step=50, seed=0, number=next(numbers))

    found["picks_per_s"] = [rate(picks // 3, one) for _ in range(3)]
    chance, sampler = np.random.default_rng(2), catalogue.sampler
    some, cells = chance.integers(0, size, picks).tolist(), chance.integers(0, sampler.cells, picks).tolist()
    weights = chance.integers(1, 1 << 20, picks).tolist()
    found["updates_per_s"] = [rate(picks, lambda i: sampler.weigh(cells[i], weights[i])) for _ in range(3)]
    found["moves_per_s"] = [rate(picks, lambda i: sampler.move(some[i], cells[i]))]
    return found


def _reweighed_s(catalogue: Catalogue, estimates: Hardness, i: int) -> float:
    """Of the draw after a result: all weights are computed once."""
    _, category, cell = problem(i)
    estimates.observe(Outcome(category, cell, 8, 3, 2.0, 40.0, 40))
    began = time.process_time()
    catalogue.draw(estimates, 1, step=40, seed=0, number=3 + i)
    return time.process_time() - began


class Fleet:
    """Workers, graders, a trainer and an engine that answer at once."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[t.Topic, Any]] = deque()
        self.ready: list[str] = []
        self.step = 0
        self.inbox.append((t.STEPS_COMMITTED, m.IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1)))
        self._publish()

    def _publish(self) -> None:
        n = self.step
        published = m.PolicyPublished(run=RUN, serial=n, incarnation=0, step=n, parent=n - 1, manifest=REF)
        self.inbox.append((t.POLICIES_PUBLISHED, published))
        self.inbox.append((t.POLICIES_APPLIED, m.PolicyApplied(run=RUN, replica="engine", url="", serial=n)))

    def hear(self, message: Any) -> None:
        match message:
            case m.RolloutRequested(key=key):
                self.inbox.append((t.ATTEMPTS_PROGRESS, m.AttemptClaimed(run=RUN, key=key, worker="w")))
                self.inbox.append((t.ROLLOUTS_FINISHED, self._finished(message)))
                self.inbox.append((t.ROLLOUTS_SCORED, self._scored(message)))
            case m.GroupReady(group=group):
                self.ready.append(group)
                if len(self.ready) == CONFIG.schedule.groups_per_step:
                    self.step += 1
                    groups = dict.fromkeys(self.ready, 0)
                    trained = m.StepCommitted(run=RUN, incarnation=0, step=self.step, serial=self.step, groups=groups)
                    self.inbox.append((t.STEPS_COMMITTED, trained))
                    self.ready = []
                    self._publish()

    def _finished(self, request: m.RolloutRequested) -> m.RolloutFinished:
        return m.RolloutFinished(
            run=RUN,
            key=request.key,
            stop=m.StopReason.submitted,
            trajectory=REF,
            effort=m.Effort(thinking_tokens=10, turns=2),
            reward_config=request.reward_config,
            pack_hidden=REF,
            oldest_version=self.step,
            oldest_kv_version=self.step,
            newest_version=self.step,
            worker="w",
            seconds=1.0,
        )

    def _scored(self, request: m.RolloutRequested) -> m.RolloutScored:
        solved = int(request.key.attempt[-4:], 16) % 3 == 0
        return m.RolloutScored(
            run=RUN,
            key=request.key,
            verdict=m.Verdict(solved=solved, passed=int(solved), total=1),
            reward=float(solved),
            terms={},
            reward_config=request.reward_config,
            trajectory=REF,
            effort=m.Effort(thinking_tokens=10, turns=2),
            stop=m.StopReason.submitted,
            oldest_version=self.step,
            newest_version=self.step,
        )


class Received:
    def __init__(self, topic: t.Topic, message: Any, offset: int) -> None:
        self.topic, self.message, self.offset = topic, message, offset


def batch_ms(desk: Desk, batches: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each batch, of the processor and by the clock, after the run was loaded and the first problem drawn."""
    fleet, cpu, wall, handled = Fleet(), [], [], 0
    practised = False
    for number in range(batches + 3):
        size = min(256, len(fleet.inbox))
        batch = [Received(*fleet.inbox.popleft(), handled + i) for i in range(size)]
        handled += size
        began, started = time.process_time(), time.perf_counter()
        result = desk.handle(batch, 1000.0 + number * 0.3)
        if number >= 3:
            cpu.append(1000 * (time.process_time() - began))
            wall.append(1000 * (time.perf_counter() - started))
        if result.refused:
            raise SystemExit(f"scheduler: the desk refused {list(result.refused.values())[:3]}; expected nothing")
        for _, one in result.outbox:
            fleet.hear(one.message)
        if not practised:  # as many cells as in a long run, so that weights cost what they do then
            practise(desk.sets[RUN].hardness, len(desk.sets[RUN].catalogue))
            practised = True
    if fleet.step < batches // 60:
        raise SystemExit(f"scheduler: {batches} batches made {fleet.step} steps; expected more")
    return cpu, wall


def choices(size: int) -> dict[str, list[float]]:
    """numpy's choice, one weighted draw at a time over what is free."""
    chance = np.random.default_rng(3)
    weights, free = chance.uniform(0.001, 1, size), np.ones(size, dtype=bool)

    def one(_: int) -> None:
        p = weights * free
        free[chance.choice(size, p=p / p.sum())] = False

    return {"choice.picks_per_s": [rate(CHOICES, one)]}


def heap(size: int, picks: int) -> dict[str, list[float]]:
    """A heap of arrival times, of an exponential race."""
    chance = np.random.default_rng(4)
    weights = chance.uniform(0.001, 1, size)
    arrivals = chance.exponential(size=size) / weights
    entries = list(zip(arrivals.tolist(), range(size), strict=True))
    heapq.heapify(entries)
    new = chance.exponential(size=picks).tolist()
    picks = min(picks, size // 2)
    return {
        "heap.updates_per_s": [rate(picks, lambda i: heapq.heappush(entries, (new[i], i)))],
        "heap.picks_per_s": [rate(picks, lambda i: heapq.heappop(entries))],
        "heap.rss_mb": [rss_mb()],
    }


def no_repeat(size: int) -> dict[str, list[float]]:
    """Pick every problem of ten thousand cells. Raises SystemExit where one comes twice or not at all."""
    sampler, chance = Sampler(), np.random.default_rng(5)
    cells = [sampler.new_cell(int(i)) for i in chance.integers(0, 1 << 62, 10_000)]
    for cell in cells:
        sampler.weigh(cell, int(chance.integers(1, 1 << 20)))
    sampler.add(
        chance.integers(0, 1 << 63, size).astype(np.uint64), chance.integers(0, len(cells), size).astype(np.uint32)
    )
    seen = bytearray(size)
    for number in range(size):
        handle = sampler.pick(1, number)
        if handle is None or seen[handle]:
            raise SystemExit(f"scheduler: pick {number} of {size} is {handle}; expected one that was not picked before")
        seen[handle] = 1
    return {"repeats": [float(seen.count(0))]}


UNITS = {
    "start_s": ("from the ledger to the first draw", "s", "at most 60 s"),
    "practised_s": ("the first draw after the results of 9,740 cells", "s", ""),
    "weights_ms": ("the draw after one more result: all weights", "ms", ""),
    "picks_per_s": ("draws of one problem", "picks/s", "at least 50,000"),
    "updates_per_s": ("weights of cells changed", "changes/s", "at least 50,000"),
    "moves_per_s": ("problems moved to another cell", "moves/s", "at least 50,000"),
    "rss_mb": ("the greatest resident set", "MB", "at most 1,500 MB"),
    "batch_p99_ms": ("a batch of up to 256 messages, p99", "ms", "at most 50 ms"),
    "batch_median_ms": ("a batch of up to 256 messages, median", "ms", ""),
    "batch_clock_p99_ms": ("the same p99 by the clock", "ms", ""),
    "choice.picks_per_s": ("numpy's choice", "picks/s", ""),
    "heap.picks_per_s": ("a heap of an exponential race", "picks/s", ""),
    "heap.updates_per_s": ("the heap: weights of single problems changed", "changes/s", ""),
    "heap.rss_mb": ("the heap's greatest resident set", "MB", ""),
    "repeats": ("problems that came twice when all were drawn", "problems", "none"),
}


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def name_of(kind: str, size: int, largest: int) -> str:
    """The greatest size has the ids that promises are about, whether quick or not."""
    if kind == "batch_p99_ms" and size == largest:
        return "scheduler.batch_p99_ms"
    return f"scheduler.{kind}.1e{len(str(size)) - 1}"


def plot(curves: dict[str, dict[int, float]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    panels: list[tuple[str, list[str]]] = [
        (
            "picks and changes a second",
            ["picks_per_s", "updates_per_s", "moves_per_s", "heap.picks_per_s", "choice.picks_per_s"],
        ),
        ("MB", ["rss_mb", "heap.rss_mb"]),
        ("seconds of the processor", ["start_s", "weights_ms", "batch_p99_ms"]),
    ]
    for axis, (title, kinds) in zip(axes, panels, strict=True):
        for kind in kinds:
            points = curves.get(kind, {})
            scale = 0.001 if kind.endswith("_ms") else 1.0
            label = UNITS[kind][0] if kind != "picks_per_s" else "ours: draws"
            axis.plot(list(points), [value * scale for value in points.values()], marker="o", label=label)
        axis.set(title=title, xlabel="problems", xscale="log", yscale="log")
        axis.legend(fontsize=7)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def main() -> None:
    bench = Bench.start(__doc__)
    sizes, picks = bench.pick(SIZES, QUICK_SIZES), bench.pick(PICKS, QUICK_PICKS)
    curves: dict[str, dict[int, float]] = {}
    for size in sizes:
        print(f"{size:,} problems …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.db"
            apart(write_ledger, path, size)
            found = apart(ours, path, size, picks, bench.pick(BATCHES, QUICK_BATCHES))
        found |= apart(choices, size) | apart(heap, size, picks)
        if size == sizes[-1]:
            found |= apart(no_repeat, size)
        for kind, values in found.items():
            what, unit, against = UNITS[kind]
            new = bench.add(record(name_of(kind, size, sizes[-1]), f"{what}, {size:,} problems", values, unit, against))
            curves.setdefault(kind, {})[size] = new.value
    bench.end()
    if bench.json:
        plot(curves, bench.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
