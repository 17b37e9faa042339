"""The admission gate: oracle = 1 and no-op = 0, seen in fresh sandboxes exactly as graders run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.problems.schema import Case, Hidden, Problem
from shared.sandbox import CallResult, FunctionRun, Functions
from shared.sandbox.pool import FunctionPool
from shared.sandbox.problems import FileGone, NotRunnable, passes, run_of

Pair = tuple[Problem, Hidden]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reason` is empty for an admitted problem. `problem.actual` is what the broken files did, where it was missing.
    `proven`: there was a solution and it passed."""

    problem: Problem
    hidden: Hidden
    reason: str = ""
    proven: bool = False


async def check(functions: Functions, pairs: Sequence[Pair]) -> list[Outcome]:
    """One outcome per problem, in order; what nothing here can run is refused like what fails. Raises SandboxUnavailable."""
    planned = [_plan(*pair) for pair in pairs]
    return _outcomes(pairs, planned, await functions.run(_runs(planned)))


def check_sync(functions: FunctionPool, pairs: Sequence[Pair]) -> list[Outcome]:
    """The same for callers without an event loop."""
    planned = [_plan(*pair) for pair in pairs]
    return _outcomes(pairs, planned, functions.run_sync(_runs(planned)))


def _plan(problem: Problem, hidden: Hidden) -> list[FunctionRun] | str:
    """Of the broken files, and of the solution where there is one; or why there can be no run."""
    states = [problem.files, {**problem.files, **hidden.solution}] if hidden.solution else [problem.files]
    cases = (*problem.visible, *hidden.cases)
    try:
        return [run_of(problem, files, cases, stop_at_error=False) for files in states]
    except NotRunnable as error:
        return str(error)
    except FileGone as error:
        return f"entry: {error} is not in 'files'"


def _runs(planned: Sequence[list[FunctionRun] | str]) -> list[FunctionRun]:
    return [run for runs in planned if not isinstance(runs, str) for run in runs]


def _outcomes(
    pairs: Sequence[Pair], planned: Sequence[list[FunctionRun] | str], done: Sequence[list[CallResult]]
) -> list[Outcome]:
    results = iter(done)
    outcomes = []
    for (problem, hidden), runs in zip(pairs, planned, strict=True):
        if isinstance(runs, str):
            outcomes.append(Outcome(problem, hidden, runs))
            continue
        broken, *oracle = [next(results) for _ in runs]
        outcomes.append(_judge(problem, hidden, broken, oracle[0] if oracle else None))
    return outcomes


def _judge(
    problem: Problem, hidden: Hidden, broken: Sequence[CallResult], oracle: Sequence[CallResult] | None
) -> Outcome:
    cases: list[Case] = [*problem.visible, *hidden.cases]
    if oracle is not None:
        for index, (case, result) in enumerate(zip(cases, oracle, strict=True)):
            if not passes(case, result):
                got = result.error or result.value
                reason = f"oracle: the solution gives {got} for {_name(problem, index)}, expected {case.expected}"
                return Outcome(problem, hidden, reason[:500])
    if all(passes(case, result) for case, result in zip(cases, broken, strict=True)):
        return Outcome(problem, hidden, "no-op: the given files pass every case; nothing is to be done")
    if not problem.actual:
        actual = [result.value or result.error for result in broken[: len(problem.visible)]]
        problem = msgspec.structs.replace(problem, actual=actual)
    return Outcome(problem, hidden, proven=oracle is not None)


def _name(problem: Problem, index: int) -> str:
    visible = len(problem.visible)
    return f"visible[{index}]" if index < visible else f"hidden[{index - visible}]"
