"""The admission gate: oracle = 1 and no-op = 0, seen in fresh sandboxes exactly as graders run them.

The solution runs several times, each in a sandbox of its own: one that passes now and then is no oracle. That costs ORACLES - 1
more short runs a problem with a solution; the broken files still run once, since a wrong answer once is enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared.environments import Outcome
from shared.environments.function.runs import RETURNED, FileGone, NotRunnable, got, passes, run_of
from shared.problems.schema import Case, FunctionHidden, FunctionProblem
from shared.sandbox import CallResult, FunctionRun, Functions
from shared.sandbox.pool import FunctionPool

Pair = tuple[FunctionProblem, FunctionHidden]
ORACLES = 5  # runs of the solution: one that is right 80 % of the time passes all with probability 0.33, 50 %: 0.03
_SHOWN = 160  # characters of a value
# Of errors that are no exception of the code's own.
_MEANS = {
    "Unprintable": "not a plain value: docs/problems.md lists them",
    "Timeout": "longer than limits.call_s, or all cases longer than limits.time_s",
    "CpuLimit": "its processes took more processor time together than limits.time_s",
    "OutputLimit": "all cases together give more text than a sandbox takes, 1 MiB",
    "Died": "its process ended, by itself or at limits.memory_mb",
    RETURNED: "a value; the case expects an argument changed in place, and None",
    "ModuleNotFoundError": "a sandbox has the standard library alone, without the module of 'origin'",
}


async def check(functions: Functions, pairs: Sequence[Pair]) -> list[Outcome]:
    """Return one outcome per problem, in order. A problem that cannot run here is refused. Raises SandboxUnavailable."""
    planned = [_plan(*pair) for pair in pairs]
    return _outcomes(pairs, planned, await functions.run(_runs(planned)))


def check_sync(functions: FunctionPool, pairs: Sequence[Pair]) -> list[Outcome]:
    """Return the outcomes as `check` does, for callers without an event loop."""
    planned = [_plan(*pair) for pair in pairs]
    return _outcomes(pairs, planned, functions.run_sync(_runs(planned)))


def _plan(problem: FunctionProblem, hidden: FunctionHidden) -> list[FunctionRun] | str:
    """Return the runs of the broken files and, if there is one, of the solution; or the reason why the problem cannot run."""
    states = [problem.files, *[{**problem.files, **hidden.solution}] * (ORACLES if hidden.solution else 0)]
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
        outcomes.append(_judge(problem, hidden, broken, oracle))
    return outcomes


def _judge(
    problem: FunctionProblem,
    hidden: FunctionHidden,
    broken: Sequence[CallResult],
    oracles: Sequence[Sequence[CallResult]],
) -> Outcome:
    cases: list[Case] = [*problem.visible, *hidden.cases]
    passed = {tuple(passes(case, result) for case, result in zip(cases, run, strict=True)) for run in oracles}
    for index, (case, *results) in enumerate(zip(cases, *oracles, strict=True) if oracles else ()):
        if wrong := [result for result in results if not passes(case, result)]:
            given, wanted = _explained(_short(got(case, wrong[0]))), _short(case.expected)
            reason = f"oracle: the solution gives {given} for {_name(problem, index)}, expected {wanted}"
            if len(passed) > 1:
                reason += f" in {len(wrong)} of {len(results)} runs: not the same each time; allowed: every run passes every case"
            return Outcome(problem, hidden, reason)
    if oracles:
        cases = [_marked(case, result) for case, result in zip(cases, oracles[0], strict=True)]
    if all(passes(case, result) for case, result in zip(cases, broken, strict=True)):
        return Outcome(problem, hidden, "no-op: the given files pass every case; nothing is to be done")
    shown = len(problem.visible)
    actual = [got(case, result) for case, result in zip(cases[:shown], broken[:shown], strict=True)]
    return Outcome(
        msgspec.structs.replace(problem, visible=cases[:shown], actual=actual),
        msgspec.structs.replace(hidden, cases=cases[shown:]),
        proven=bool(oracles),
    )


def _marked(case: Case, oracle: CallResult) -> Case:
    """Let the solution say whether the case expects a returned or a changed value, unless the case says it."""
    if isinstance(case.changed, msgspec.UnsetType):
        return msgspec.structs.replace(case, changed=oracle.changed)
    return case


def _short(text: str) -> str:
    """Return a long value as its two ends, since two values may differ in either."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def _explained(error: str) -> str:
    return f"{error} ({_MEANS[error]})" if error in _MEANS else error


def _name(problem: FunctionProblem, index: int) -> str:
    visible = len(problem.visible)
    return f"visible[{index}]" if index < visible else f"hidden[{index - visible}]"
