"""Function runs: wall clock and processor time of one candidate with ten calls, by kind of sandbox. Then sandboxes in which
an agent lives (benchmarks/agent_sandboxes.py).

python -m benchmarks.sandboxes [--quick] [--json FILE] [--only functions|agents]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from benchmarks import agent_sandboxes
from benchmarks.records import Bench
from shared.sandbox import FunctionRun, Limits, connect
from shared.sandbox.pool import FunctionPool

SOURCE = "def f(x):\n    return sorted(x) + [1]\n"
CALLS = 10
LIMITS = Limits(time_s=60.0)  # a busy machine must not end a measurement


def run(calls: int = CALLS, **options: tuple[str, ...]) -> FunctionRun:
    return FunctionRun(SOURCE, "f", ("[[3, 1, 2]]",) * calls, LIMITS, **options)


@contextmanager
def pool(kind: str) -> Iterator[FunctionPool]:
    functions = connect(kind, workers=1)
    functions.run_sync([run()])
    try:
        yield functions
    finally:
        functions.close_sync()


def processor_s() -> float:
    """Of this process and of everything below it that was reaped inside a sandbox."""
    own = time.process_time()
    below = (child.cpu_times() for child in psutil.Process().children(recursive=True))
    return own + sum(t.user + t.system + t.children_user + t.children_system for t in below)


def per_run(count: int, clock: Callable[[], float], work: Callable[[], object]) -> float:
    """Milliseconds of `clock` for one of the `count` runs that `work` does."""
    started = clock()
    work()
    return (clock() - started) / count * 1e3


def measure(bench: Bench, kind: str, name: str, what: str, one: FunctionRun) -> None:
    count = bench.pick(100, 50)  # a nursery that was replaced in between would take its share of the clock along
    with pool(kind) as functions:

        def work() -> None:
            functions.run_sync([one] * count)

        bench.measure(f"sandbox.{name}.wall", what, "ms", lambda: per_run(count, time.perf_counter, work))
        bench.measure(f"sandbox.{name}.processor", what, "ms", lambda: per_run(count, processor_s, work))


def restarted(functions: FunctionPool, count: int) -> None:
    """What a sandbox per run costs without a nursery: bubblewrap and an interpreter each time."""
    for _ in range(count):
        slot = functions._idle.get()
        slot.close()
        functions._idle.put(slot)
        functions.run_sync([run()])


def main() -> None:
    bench = Bench.start(__doc__, parts=("functions", "agents"))
    if bench.wants("functions"):
        functions_figures(bench)
    if bench.wants("agents"):
        agent_sandboxes.measure(bench)
    bench.end()


def functions_figures(bench: Bench) -> None:
    measure(bench, "process", "process", f"a run of {CALLS} calls, no isolation", run())
    measure(bench, "bubblewrap", "nursery", f"a run of {CALLS} calls", run())
    measure(bench, "bubblewrap", "calls", "a run of 200 calls", run(200))
    measure(bench, "bubblewrap", "hidden", "origin in the standard library", run(forbidden_imports=("colorsys",)))
    with pool("bubblewrap") as functions:
        few = bench.pick(20, 5)
        bench.measure(
            "sandbox.start.wall",
            "a run in a sandbox started for it alone",
            "ms",
            lambda: per_run(few, time.perf_counter, lambda: restarted(functions, few)),
            against="sandbox.nursery.wall",
        )


if __name__ == "__main__":
    main()
