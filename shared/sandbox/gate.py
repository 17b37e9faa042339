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
_SHOWN = 160  # characters of a value
# Of errors that are no exception of the code's own.
_MEANS = {
    "Unprintable": "not a plain value: docs/problems.md lists them",
    "Timeout": "longer than limits.call_s, or all cases longer than limits.time_s",
    "OutputLimit": "all cases together give more text than a sandbox takes, 1 MiB",
    "Died": "its process ended, by itself or at limits.memory_mb",
    "ModuleNotFoundError": "a sandbox has the standard library alone, without the module of 'origin'",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reason` is empty for an admitted problem, whose `problem.actual` is what the broken files did, whatever it was before.
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
                got = _short(result.value) if result.value is not None else _explained(result.error)
                wanted = _short(case.expected)
                reason = f"oracle: the solution gives {got} for {_name(problem, index)}, expected {wanted}"
                return Outcome(problem, hidden, reason)
    if all(passes(case, result) for case, result in zip(cases, broken, strict=True)):
        return Outcome(problem, hidden, "no-op: the given files pass every case; nothing is to be done")
    actual = [result.value or result.error for result in broken[: len(problem.visible)]]
    return Outcome(msgspec.structs.replace(problem, actual=actual), hidden, proven=oracle is not None)


def _short(text: str) -> str:
    """Both ends of a long value: two may differ in either."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def _explained(error: str) -> str:
    return f"{error} ({_MEANS[error]})" if error in _MEANS else error


def _name(problem: Problem, index: int) -> str:
    visible = len(problem.visible)
    return f"visible[{index}]" if index < visible else f"hidden[{index - visible}]"
