"""The processor time of a function run is that of all its processes, however they came about and whoever waits for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from shared.environments.function import grading
from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.problems.values import encode
from shared.process import identity
from shared.sandbox import CallResult, FunctionRun, Limits, bubblewrap, cgroups, meter, process
from shared.sandbox.pool import FunctionPool
from shared.sandbox.slot import Slot

pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="bwrap is not installed")
LIMIT_S = 1.0
HONEST = FunctionRun("def f(): return 'fine'", "f", ("[]",), Limits(time_s=100.0))
BURN = """
import os, signal, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
"""
# Each spends about three times the limit, no process more than 0.6 s, and returns a value.
ATTACKS = {
    "a chain that is waited for": """
def f():
    for _ in range(5):
        if (pid := os.fork()):
            os.waitpid(pid, 0)
            os._exit(0)
        burn(0.6)
    return 'all of it'
""",
    "orphans in sessions of their own": """
def f():
    done, tell = os.pipe()
    for _ in range(5):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                burn(0.6)
                os.write(tell, b'x')
            os._exit(0)
    return [os.read(done, 1) for _ in range(5)] and 'all of it'
""",
    "children that nobody waits for": """
def f():
    done, tell = os.pipe()
    for _ in range(5):
        if os.fork() == 0:
            burn(0.6)
            os.write(tell, b'x')
            os._exit(0)
    return [os.read(done, 1) for _ in range(5)] and 'all of it'
""",
}
# The kernel throws the time of such children away: only its own count of the whole group has it.
UNSEEN = """
def f():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for _ in range(60):
        if os.fork() == 0:
            burn(0.04)
            os._exit(0)
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
    return 'all of it'
"""


def pool_of(meter_of: object, monkeypatch: pytest.MonkeyPatch) -> FunctionPool:
    monkeypatch.setattr(meter, "of", meter_of)
    return FunctionPool(lambda n: Slot(lambda: bubblewrap.start(n), bubblewrap.standard_module_paths), 1)


@pytest.fixture(params=["kernel", "sampled"])
def functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FunctionPool]:
    if request.param == "kernel" and not cgroups.clocks_here():
        pytest.skip("no cgroup of this process can be divided")
    pool = pool_of(meter.KernelMeter if request.param == "kernel" else meter.SampledMeter, monkeypatch)
    yield pool
    pool.close_sync()


def attack(pool: FunctionPool, source: str) -> list[CallResult]:
    """Run it, and an honest run after it."""
    limits = Limits(time_s=100.0, cpu_s=LIMIT_S, call_s=30.0)
    results, honest = pool.run_sync([FunctionRun(BURN + source, "f", ("[]",), limits), HONEST])
    assert honest == [CallResult('"fine"')]
    return results


@pytest.mark.parametrize("name", ATTACKS)
def test_processes_share_the_processor_time_of_one_run(functions: FunctionPool, name: str) -> None:
    results = attack(functions, ATTACKS[name])
    assert results == [CallResult(None, "CpuLimit")]


def test_children_whose_time_the_kernel_throws_away_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if not cgroups.clocks_here():
        pytest.skip("no cgroup of this process can be divided")
    pool = pool_of(meter.KernelMeter, monkeypatch)
    results = attack(pool, UNSEEN)
    assert results == [CallResult(None, "CpuLimit")]
    pool.close_sync()


def test_threads_and_children_within_the_limit_change_nothing(functions: FunctionPool) -> None:
    source = """
import concurrent.futures
def f():
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = sum(threads.map(lambda n: sum(range(n)), range(1000)))
    if (pid := os.fork()) == 0:
        burn(0.1)
        os._exit(7)
    return [found, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
"""
    results = attack(functions, source)
    assert results == [CallResult("[166167000, 7]")]


def test_a_verdict_names_the_limit() -> None:
    case = Case(args=encode([1]), expected=encode("all of it"))
    problem = FunctionProblem(id="p", files={"main.py": "def f(x): return x\n"}, entry="f", visible=[case])
    verdict = grading.judge(problem, FunctionHidden(id="p", cases=[], solution={}), [CallResult(None, "CpuLimit")])
    assert (verdict.solved, verdict.error) == (False, "CpuLimit")


def test_a_nursery_leaves_no_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it ends nor when its service was killed: the next one that starts removes it."""
    places = cgroups.clocks_here()
    if not places:
        pytest.skip("no cgroup of this process can be divided")
    parent = places[0][0]
    me = identity(os.getpid())
    assert me is not None
    left = parent / f"{meter._of_machine(me)}999999999-0-ab"
    left.mkdir()
    pool = pool_of(meter.KernelMeter, monkeypatch)
    pool.run_sync([HONEST])
    mine = sorted(parent.glob(f"{meter._of_machine(me)}{os.getpid()}-*"))
    assert mine
    assert not left.exists()
    pool.close_sync()
    assert not sorted(parent.glob(f"{meter._of_machine(me)}{os.getpid()}-*"))


def test_bare_processes_are_measured_too() -> None:
    pool = FunctionPool(lambda _: Slot(process.start, lambda top: ()), 1)
    results = attack(pool, ATTACKS["a chain that is waited for"])
    assert results == [CallResult(None, "CpuLimit")]
    pool.close_sync()
