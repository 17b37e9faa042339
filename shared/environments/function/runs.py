"""A problem of kind `function` as a sandbox run. The agent's tests, the admission gate and the graders use the same run, so that
all see the same outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shared.problems import Case, FunctionProblem
from shared.problems.importing import entry_of
from shared.problems.values import equal
from shared.sandbox import CallResult, FunctionRun, Limits

# Wall clock over processor time: a busy machine must not turn a right answer into a wrong one. What loops is ended by its
# processor time; only what sleeps gets to wait so long.
PATIENCE = 5.0
# The nursery counts as one, the candidate as one, and a thread until the kernel has reaped it, later than its join: solutions
# with a few threads need room. Threads share the problem's memory; each forked process may take it once more.
PROCESSES = 16
RETURNED = "Returned"  # stands for a value that was returned where an argument has to be changed
_NONE = "null"


class NotRunnable(ValueError):
    """The problem cannot be run: it is not one function in one of its files, or its limits are above the sandbox's. The agent is
    not at fault."""


class FileGone(LookupError):
    """The files no longer hold the one with the function under test."""


def run_of(
    problem: FunctionProblem, files: Mapping[str, str], cases: Sequence[Case], *, stop_at_error: bool
) -> FunctionRun:
    """Return the run of one state of the files, in a fresh sandbox. Only arguments go in, never an expected output. Raises
    NotRunnable, FileGone."""
    if problem.kind != "function":
        raise NotRunnable(f"problem {problem.id}: kind {problem.kind!r}; only kind 'function' runs here")
    try:
        path, name = entry_of(problem)
    except ValueError as error:
        raise NotRunnable(f"problem {problem.id}: entry: {error}") from None
    if objection := problem.limits.objection():
        raise NotRunnable(f"problem {problem.id}: limits: {objection}")
    if path not in files:
        raise FileGone(path)
    return FunctionRun(
        source=files[path],
        entry=name,
        args=tuple(case.args for case in cases),
        limits=Limits(
            time_s=PATIENCE * problem.limits.time_s,
            cpu_s=problem.limits.time_s,
            call_s=problem.limits.of_a_call,
            memory_mb=problem.limits.memory_mb,
            processes=PROCESSES,
        ),
        forbidden_imports=origin_modules(problem),
        stop_at_error=stop_at_error,
    )


def passes(case: Case, result: CallResult) -> bool:
    """Return whether a call gave what the case expects, type-exactly and in the way that it expects."""
    return result.value is not None and _way_fits(case, result) and equal(result.value, case.expected)


def _way_fits(case: Case, result: CallResult) -> bool:
    return isinstance(case.changed, msgspec.UnsetType) or case.changed == result.changed


def got(case: Case, result: CallResult) -> str:
    """Return what agents and people are shown of a result: a tagged value, or a name. It equals `case.expected` only where the
    case passes: a value that came in the other way is shown as None, or as RETURNED."""
    if result.value is None:
        return result.error
    if _way_fits(case, result):
        return result.value
    if result.changed:  # a forgotten `return`; but where None is expected, the change is what is wrong
        return _NONE if case.expected != _NONE else result.value
    return RETURNED


def origin_modules(problem: FunctionProblem) -> tuple[str, ...]:
    """Return the module that the problem was made from, which a candidate may not import: it holds the answer. Empty: unknown.
    `origin` names it as `distribution:module:qualname`."""
    parts = problem.origin.split(":")
    return (parts[1],) if len(parts) == 3 and parts[1] else ()
