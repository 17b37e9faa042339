"""From a trajectory to sandbox runs, and from their results to a verdict. Pure: nothing here executes or stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared.contracts.messages import Verdict
from shared.problems import Case, Hidden, Problem, values
from shared.sandbox import CallResult, FunctionRun, Limits

# Wall clock over processor time: a busy machine must not turn a right answer into a wrong one. What loops is ended by its
# processor time; only what sleeps gets to wait so long.
PATIENCE = 5.0


class Ungradable(Exception):
    """Not the agent's doing: this grader cannot grade such a problem."""


class TaskError(Exception):
    """The agent's doing: its files cannot even be called. Scored as unsolved; the text is Verdict.error."""


def cases(problem: Problem, hidden: Hidden) -> list[Case]:
    """Visible first: they are cheap to pass, and the first failure ends the run."""
    return [*problem.visible, *hidden.cases]


def run_of(problem: Problem, hidden: Hidden, files: Mapping[str, str]) -> FunctionRun:
    """One fresh sandbox for one state of the files. Only arguments go in. It stops at the first exception: the verdict
    cannot change any more, and most wrong candidates that hang would hang in every case."""
    if problem.kind != "function":
        raise Ungradable(f"problem {problem.id}: kind {problem.kind!r}; this grader grades kind 'function'")
    path, _, name = problem.entry.rpartition("::")
    if not path:
        if len(problem.files) != 1:
            raise Ungradable(f"problem {problem.id}: entry {problem.entry!r} names no file, and there are several")
        (path,) = problem.files
    if path not in files:
        raise TaskError("MissingFile")
    origin = problem.origin.split(":")
    return FunctionRun(
        source=files[path],
        entry=name,
        args=tuple(case.args for case in cases(problem, hidden)),
        limits=Limits(
            time_s=PATIENCE * problem.limits.time_s, cpu_s=problem.limits.time_s, memory_mb=problem.limits.memory_mb
        ),
        forbidden_imports=(origin[1],) if len(origin) == 3 and origin[1] else (),
        stop_at_error=True,
    )


def judge(problem: Problem, hidden: Hidden, results: Sequence[CallResult]) -> Verdict:
    """Compares outside the sandbox, type-exactly. `passed` counts up to the first exception."""
    expected = cases(problem, hidden)
    passed = sum(
        result.value is not None and values.equal(result.value, case.expected)
        for result, case in zip(results, expected, strict=True)
    )
    error = next((result.error for result in results if result.error), "")
    return Verdict(solved=bool(expected) and passed == len(expected), passed=passed, total=len(expected), error=error)
