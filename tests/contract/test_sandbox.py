"""Functions: the same promises from every adapter. The bare process keeps only these, none of the attacks'."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator

import pytest

from shared.problems.values import decode, encode
from shared.sandbox import CallResult, FunctionRun, Limits, SandboxUnavailable, connect
from shared.sandbox.pool import FunctionPool
from tests.contract.sandboxes import FUNCTIONS, OfFunctions, every
from tests.patience import patient


@pytest.fixture(scope="module", params=every(FUNCTIONS))
def adapter(request: pytest.FixtureRequest) -> OfFunctions:
    return request.param


@pytest.fixture(scope="module")
def functions(adapter: OfFunctions) -> Iterator[FunctionPool]:
    pool = adapter.make()
    yield pool
    pool.close_sync()


PATIENT = Limits(time_s=60.0)  # tests run on busy machines


def call(functions: FunctionPool, source: str, *args: list[object], **options: object) -> list[CallResult]:
    run = FunctionRun(source, "f", tuple(encode(a) for a in args), **{"limits": PATIENT, **options})  # type: ignore[arg-type]
    return functions.run_sync([run])[0]


def test_results_come_in_order_one_per_call(functions: FunctionPool) -> None:
    results = call(functions, "def f(x, y):\n    return (x, y)", [1, "a"], [2.5, None], [{3}, b"c"])
    assert [decode(r.value or "") for r in results] == [(1, "a"), (2.5, None), ({3}, b"c")]
    assert call(functions, "def f(): pass") == []


def test_the_user_has_a_name_and_a_home(functions: FunctionPool) -> None:
    source = "import getpass, os\ndef f(): return [getpass.getuser(), os.path.expanduser('~')[:1]]"
    (result,) = call(functions, source, [])
    assert (result.error or "", decode(result.value or "None")) == ("", ["agent", "/"])


def test_runs_of_a_batch_come_in_order(functions: FunctionPool) -> None:
    runs = [FunctionRun(f"def f(): return {i}", "f", ("[]",), PATIENT) for i in range(20)]
    assert asyncio.run(functions.run(runs)) == [[CallResult(str(i))] for i in range(20)]


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def f(x): return 1 / 0", "ZeroDivisionError"),
        ("def f(x) return", "SyntaxError"),
        ("g = 1", "NameError"),
        ("f = 1", "TypeError"),
        ("def f(): pass", "TypeError"),
        ("def f(x): return object()", "Unprintable"),
        ("def f(x): raise SystemExit", "SystemExit"),
        ("def f(x): return f(x)", "RecursionError"),
        ("class E(Exception): pass\nE.__name__ = 'x\\nv1'\ndef f(x): raise E", "Error"),
        ("import no_such_module\ndef f(x): pass", "ModuleNotFoundError"),
    ],
)
def test_a_failing_candidate_gives_errors_by_name(functions: FunctionPool, source: str, error: str) -> None:
    assert call(functions, source, [1], [2]) == [CallResult(None, error)] * 2


KNOWS_ITS_NAMES = """
from __future__ import annotations
import copy, pickle, typing
from dataclasses import dataclass

@dataclass
class Point:
    x: int
    next: Point | None = None

def f(x):
    point = pickle.loads(pickle.dumps(copy.deepcopy(Point(x))))
    return [point.x, list(typing.get_type_hints(Point))]
"""


def test_classes_of_the_candidate_are_found_by_their_module(functions: FunctionPool) -> None:
    results = call(functions, KNOWS_ITS_NAMES, [1], [2])
    assert results == [CallResult('[1, ["x", "next"]]'), CallResult('[2, ["x", "next"]]')]


def test_a_call_past_its_time_is_a_timeout_and_the_next_one_still_runs(functions: FunctionPool) -> None:
    source = "def f(n):\n    while n:\n        pass\n    return 'done'"
    assert call(functions, source, [1], [0]) == [CallResult(None, "Timeout"), CallResult('"done"')]


def test_native_code_that_never_returns_is_ended_by_its_processor_time(functions: FunctionPool) -> None:
    limits = Limits(time_s=60.0, cpu_s=1.0)
    assert call(functions, "def f(): return sum(range(10**12))", [], limits=limits) == [CallResult(None, "Timeout")]


@pytest.mark.parametrize("body", ["while True:\n                pass", "import time; time.sleep(60)"])
def test_a_candidate_that_swallows_the_timeout_is_ended(functions: FunctionPool, body: str) -> None:
    source = (
        f"def f():\n    while True:\n        try:\n            {body}\n        except BaseException:\n            pass"
    )
    results = call(functions, source, [], [], limits=Limits(time_s=1.0))
    assert results == [CallResult(None, "Timeout")] * 2


def test_results_before_the_end_of_the_process_count(functions: FunctionPool) -> None:
    source = "import os\ndef f(n):\n    if n == 2:\n        os._exit(0)\n    return n"
    results = call(functions, source, [1], [2], [3])
    assert results == [CallResult("1"), CallResult(None, "Died"), CallResult(None, "Died")]


def test_a_run_that_stops_at_its_first_error_says_what_it_left_out(functions: FunctionPool) -> None:
    results = call(functions, "def f(n): return 1 // n", [1], [0], [1], stop_at_error=True)
    assert results == [CallResult("1"), CallResult(None, "ZeroDivisionError"), CallResult(None, "NotRun")]


def test_no_call_sees_what_an_earlier_one_left(functions: FunctionPool) -> None:
    source = "seen = []\ndef f(x, into=[]):\n    seen.append(x)\n    into.append(x)\n    return [seen, into]"
    assert call(functions, source, [1], [2]) == [CallResult("[[1], [1]]"), CallResult("[[2], [2]]")]


def test_no_run_sees_what_an_earlier_one_left(functions: FunctionPool) -> None:
    source = "import math\ndef f():\n    old = getattr(math, 'left', 0)\n    math.left = 1\n    return old"
    assert call(functions, source, []) == call(functions, source, []) == [CallResult("0")]


def test_usual_modules_are_given_and_others_can_be_imported(functions: FunctionPool) -> None:
    source = "def f(x):\n    import textwrap\n    return [math.floor(x), re.sub('a', 'b', 'a'), textwrap.dedent(' x')]"
    assert call(functions, source, [1.5]) == [CallResult('[1, "b", "x"]')]


def test_changed_arguments_and_iterators_are_results(functions: FunctionPool) -> None:
    assert call(functions, "def f(x): x.append(1)", [[0]]) == [CallResult("[0, 1]", changed=True)]
    assert call(functions, "def f(x): x.append(1); return x", [[0]]) == [CallResult("[0, 1]")]
    assert call(functions, "def f(x):\n    yield from x", [(1, 2)]) == [CallResult("[1, 2]")]


def test_sets_of_strings_have_the_same_order_in_every_sandbox(functions: FunctionPool) -> None:
    run = FunctionRun("def f(): return list({'a', 'b', 'c', 'd', 'e', 'f'})", "f", ("[]",), PATIENT)
    assert len({str(results) for results in functions.run_sync([run] * 8)}) == 1


@pytest.mark.parametrize("how", ["import json", "import json.decoder", "from json import dumps", "import _json"])
def test_the_origin_cannot_be_imported(functions: FunctionPool, how: str) -> None:
    source = f"{how}\ndef f(): return 1"
    assert call(functions, source, []) == [CallResult("1")]
    assert call(functions, source, [], forbidden_imports=("json.encoder",)) == [CallResult(None, "ModuleNotFoundError")]


def test_an_origin_among_the_given_modules_is_not_given(functions: FunctionPool) -> None:
    source = "import sys\ndef f():\n    return 'heapq' in globals() or 'heapq' in sys.modules"
    assert call(functions, source, [], forbidden_imports=("heapq",)) == [CallResult("false")]


def test_memory_beyond_the_limit_is_an_error_of_the_candidate(functions: FunctionPool) -> None:
    results = call(functions, "def f(): return len(bytearray(1 << 30))", [], limits=Limits(time_s=60.0, memory_mb=256))
    assert results == [CallResult(None, "MemoryError")]


def test_output_beyond_the_limit_is_cut_off(functions: FunctionPool) -> None:
    limits = Limits(output_bytes=10_000, time_s=60.0)
    results = call(functions, "def f(n): return 'x' * n", [10], [20_000], limits=limits)
    assert results[0] == CallResult(f'"{"x" * 10}"')
    assert results[1].value is None


def test_a_sandbox_that_dies_is_replaced_and_its_run_given_again(functions: FunctionPool, adapter: OfFunctions) -> None:
    call(functions, "def f(): return 1", [])
    adapter.strike(functions)
    assert call(functions, "def f(): return 1", []) == [CallResult("1")]


def _in_another_process(pool: FunctionPool, answer: multiprocessing.Queue[list[CallResult]]) -> None:
    answer.put(call(pool, "def f(): return 2", []))
    pool.close_sync()


def test_a_forked_process_gets_sandboxes_of_its_own(functions: FunctionPool) -> None:
    call(functions, "def f(): return 1", [])
    context = multiprocessing.get_context("fork")
    answer: multiprocessing.Queue[list[CallResult]] = context.Queue()  # type: ignore[assignment]
    process = context.Process(target=_in_another_process, args=(functions, answer))
    process.start()
    assert answer.get(timeout=patient(60)) == [CallResult("2")]
    process.join()
    assert call(functions, "def f(): return 1", []) == [CallResult("1")]


def test_many_callers_share_few_sandboxes(functions: FunctionPool) -> None:
    async def many() -> list[list[list[CallResult]]]:
        run = FunctionRun("def f(): return 1", "f", ("[]",), PATIENT)
        return await asyncio.gather(*(functions.run([run]) for _ in range(30)))

    assert asyncio.run(many()) == [[[CallResult("1")]]] * 30


def test_a_machine_that_cannot_isolate_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.sandbox import bubblewrap

    monkeypatch.setenv("PATH", "/nowhere")
    bubblewrap.program.cache_clear()
    pool = connect("bubblewrap", workers=1)
    with pytest.raises(
        SandboxUnavailable, match=r"install bubblewrap .*seccomp-worker\.json.*WSL2.*ETUDE_SANDBOX=process"
    ):
        pool.run_sync([FunctionRun("", "f", ("[]",), PATIENT)])
    monkeypatch.undo()
    bubblewrap.program.cache_clear()


def test_an_unknown_kind_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="allowed: bubblewrap, docker, kubernetes, process"):
        connect("podman", workers=1)
