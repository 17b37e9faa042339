"""The gate: a problem passes where its solution passes every case and its broken files do not; else it is said why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from shared.environments import Outcome
from shared.environments.function import gate
from shared.environments.function.runs import RETURNED
from shared.problems import Case, FunctionHidden, FunctionProblem, Limits
from shared.sandbox import connect
from shared.sandbox.pool import FunctionPool

Pair = tuple[FunctionProblem, FunctionHidden]
# By its own processor time, so that the machine's speed says nothing.
BUSY = """a + 1 + busy()

def busy():
    import time
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    return 0"""


@pytest.fixture(scope="module")
def functions() -> Iterator[FunctionPool]:
    pool = connect("process", 1)
    yield pool
    pool.close_sync()


def pair(*, broken: str = "a - 1", solution: str | None = "a + 1", **changed: object) -> Pair:
    text = "def f(a):\n    return {}\n"
    problem = FunctionProblem(
        id="p", files={"f.py": text.format(broken)}, entry="f", visible=[Case(args="[1]", expected="2")]
    )
    hidden = FunctionHidden(
        id="p",
        cases=[Case(args="[5]", expected="6")],
        solution={} if solution is None else {"f.py": text.format(solution)},
    )
    return msgspec.structs.replace(problem, **changed), hidden


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (pair(), ""),
        (pair(solution=None), ""),
        (pair(solution="a + 2"), "oracle: the solution gives 3 for visible[0], expected 2"),
        (
            pair(solution="object()"),
            "oracle: the solution gives Unprintable (not a plain value: docs/problems.md lists them)",
        ),
        (pair(solution="1 // 0"), "oracle: the solution gives ZeroDivisionError for visible[0], expected 2"),
        (
            pair(solution="list(range(900, 999))", visible=[Case(args="[1]", expected=str([*range(900, 998)]))]),
            f"oracle: the solution gives {str([*range(900, 999)])[:80]} … {str([*range(900, 999)])[-80:]} for visible[0], "
            f"expected {str([*range(900, 998)])[:80]} … {str([*range(900, 998)])[-80:]}",
        ),
        (pair(broken="a + 1"), "no-op: the given files pass every case; nothing is to be done"),
        (pair(broken="a + 1", solution=None), "no-op: the given files pass every case; nothing is to be done"),
        (pair(entry="g.py::f"), "problem p: entry: found 'g.py::f'; allowed: path::name with a path of 'files' (f.py)"),
        (pair(kind="repository"), "problem p: kind 'repository'; only kind 'function' runs here"),
        (pair(limits=Limits(memory_mb=10**15)), "problem p: limits: found memory_mb 1000000000000000; allowed: 64 to"),
    ],
)
def test_what_does_not_pass_is_told_why_and_keeps_no_other_from_passing(
    functions: FunctionPool, found: Pair, reason: str
) -> None:
    before, outcome, after = gate.check_sync(functions, [pair(), found, pair()])
    assert outcome.reason.startswith(reason)
    assert bool(outcome.reason) == bool(reason)
    for other in (before, after):
        assert (other.reason, other.proven) == ("", True)
    assert asyncio.run(gate.check(functions, [found])) == [outcome]


def test_a_solution_that_passes_now_and_then_is_refused_as_not_the_same_each_time(functions: FunctionPool) -> None:
    flaky = "a + 1 if __import__('random').random() < 0.5 else a + 2"
    many = [Case(args=f"[{n}]", expected=f"{n + 1}") for n in range(40)]  # two equal runs: once in 2 ** 40
    refused, other = gate.check_sync(functions, [pair(solution=flaky, visible=many), pair()])
    assert "not the same each time" in refused.reason
    assert "of 5 runs" in refused.reason
    assert not other.reason


def test_without_a_solution_nothing_is_proven(functions: FunctionPool) -> None:
    (outcome,) = gate.check_sync(functions, [pair(solution=None)])
    assert not outcome.proven


def test_what_the_broken_files_do_is_recorded_whatever_was_said(functions: FunctionPool) -> None:
    found = [pair(), pair(broken="a[0]"), pair(actual=["7"])]
    assert [outcome.problem.actual for outcome in gate.check_sync(functions, found)] == [["0"], ["TypeError"], ["0"]]


def test_a_call_may_take_as_long_as_the_problem_says(functions: FunctionPool) -> None:
    outcomes = gate.check_sync(
        functions,
        [pair(solution=BUSY), pair(solution=BUSY, limits=Limits(time_s=20.0, call_s=10.0))],
    )
    assert [outcome.reason for outcome in outcomes] == [
        "oracle: the solution gives Timeout (longer than limits.call_s, or all cases longer than limits.time_s) for visible[0], "
        "expected 2",
        "",
    ]


SORTED = ([Case(args="[[3, 1]]", expected="[1, 3]")], [Case(args="[[2, 1, 0]]", expected="[0, 1, 2]")])
RETURNS, CHANGES = "def f(a):\n    return sorted(a)\n", "def f(a):\n    a.sort()\n"


def sorting(broken: str, solution: str | None, changed: bool | msgspec.UnsetType = msgspec.UNSET) -> Pair:
    visible, cases = ([msgspec.structs.replace(case, changed=changed) for case in found] for found in SORTED)
    problem = FunctionProblem(id="p", files={"f.py": broken}, entry="f", visible=visible)
    return problem, FunctionHidden(id="p", cases=cases, solution={"f.py": solution} if solution else {})


def marks(outcome: Outcome) -> set[object]:
    return {case.changed for case in (*outcome.problem.visible, *outcome.hidden.cases)}


@pytest.mark.parametrize(("solution", "changed"), [(RETURNS, False), (CHANGES, True)])
def test_the_solution_says_whether_a_case_wants_a_returned_or_a_changed_value(
    functions: FunctionPool, solution: str, changed: bool
) -> None:
    (outcome,) = gate.check_sync(functions, [sorting(CHANGES if solution == RETURNS else RETURNS, solution)])
    assert (outcome.reason, outcome.proven) == ("", True), "a forgotten or an unwanted return is something to repair"
    assert marks(outcome) == {changed}
    assert outcome.problem.actual == [RETURNED if changed else "null"]
    again = (outcome.problem, outcome.hidden)
    assert gate.check_sync(functions, [again]) == [outcome]


def test_without_a_solution_the_file_may_say_it_or_either_counts(functions: FunctionPool) -> None:
    either, said = gate.check_sync(functions, [sorting(CHANGES, None), sorting(CHANGES, None, changed=False)])
    assert either.reason.startswith("no-op: ")
    assert (said.reason, said.proven, marks(said)) == ("", False, {False})


def test_a_solution_that_returns_where_an_argument_must_change_is_told_so(functions: FunctionPool) -> None:
    (outcome,) = gate.check_sync(functions, [sorting("def f(a):\n    pass\n", RETURNS, changed=True)])
    assert outcome.reason == (
        "oracle: the solution gives Returned (a value; the case expects an argument changed in place, and None) for visible[0], "
        "expected [1, 3]"
    )
