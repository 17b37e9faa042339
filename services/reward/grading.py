"""From a trajectory to sandbox runs, and from their results to a verdict. Pure: nothing here executes or stores."""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence

from shared.contracts.messages import Verdict
from shared.problems import Case, Hidden, Problem, values
from shared.sandbox import CallResult, FunctionRun, problems

# The names of exceptions that a verdict quotes: Python's, and those that the sandbox gives (shared.sandbox.slot). Any other may
# have been made by the agent, out of the hidden arguments that it was called with, for everybody who reads verdicts.
NAMED = frozenset(
    name for name, found in vars(builtins).items() if isinstance(found, type) and issubclass(found, BaseException)
)
NAMED |= {"Timeout", "Died", "NotRun", "OutputLimit", "Unprintable", "Error"}
OTHER = "OtherError"


class Ungradable(Exception):
    """Not the agent's doing: this grader cannot grade such a problem."""


class TaskError(Exception):
    """The agent's doing: its files cannot even be called. Scored as unsolved; the text is Verdict.error."""


def cases(problem: Problem, hidden: Hidden) -> list[Case]:
    """Visible first: they are cheap to pass, and the first failure ends the run."""
    return [*problem.visible, *hidden.cases]


def run_of(problem: Problem, hidden: Hidden, files: Mapping[str, str]) -> FunctionRun:
    """It stops at the first exception: the verdict cannot change any more, and most wrong candidates that hang would hang
    in every case."""
    try:
        return problems.run_of(problem, files, cases(problem, hidden), stop_at_error=True)
    except problems.NotRunnable as error:
        raise Ungradable(str(error)) from None
    except problems.FileGone:
        raise TaskError("MissingFile") from None


def judge(problem: Problem, hidden: Hidden, results: Sequence[CallResult]) -> Verdict:
    """Compares outside the sandbox, type-exactly. `passed` counts up to the first exception.
    The verdict holds nothing of a case."""
    expected = cases(problem, hidden)
    passed = sum(
        result.value is not None and values.equal(result.value, case.expected)
        for result, case in zip(results, expected, strict=True)
    )
    error = next((result.error for result in results if result.error), "")
    if error and error not in NAMED:
        error = OTHER
    return Verdict(solved=bool(expected) and passed == len(expected), passed=passed, total=len(expected), error=error)
