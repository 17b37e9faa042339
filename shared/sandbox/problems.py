"""A problem of kind `function` as a sandbox run: one and the same for the agent's tests, the admission gate and the graders,
so that none of them sees another outcome than the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.problems import Case, Problem
from shared.problems.importing import entry_of
from shared.problems.values import equal
from shared.sandbox import CallResult, FunctionRun, Limits

# Wall clock over processor time: a busy machine must not turn a right answer into a wrong one. What loops is ended by its
# processor time; only what sleeps gets to wait so long.
PATIENCE = 5.0
# The nursery counts as one, the candidate as one, and a thread until the kernel has reaped it, later than its join: solutions
# with a few threads need room. Threads share the problem's memory; each forked process may take it once more.
PROCESSES = 16


class NotRunnable(ValueError):
    """The problem is not one function in one of its files, or asks for more than a sandbox has: nobody's doing, but nothing that
    runs here."""


class FileGone(LookupError):
    """The files no longer hold the one with the function under test."""


def run_of(problem: Problem, files: Mapping[str, str], cases: Sequence[Case], *, stop_at_error: bool) -> FunctionRun:
    """One fresh sandbox for one state of the files. Only arguments go in, never an expected output. Raises NotRunnable,
    FileGone."""
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
    return result.value is not None and equal(result.value, case.expected)


def origin_modules(problem: Problem) -> tuple[str, ...]:
    """The module that a problem was made from, `distribution:module:qualname`: importing it would give the answer away."""
    parts = problem.origin.split(":")
    return (parts[1],) if len(parts) == 3 and parts[1] else ()
