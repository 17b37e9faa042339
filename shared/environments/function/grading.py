"""Grades functions: from a submission to sandbox runs, and from their results to a verdict.

Expected values never enter the sandbox. Every distinct state of every submission of a batch has a sandbox of its own.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence

import msgspec

from shared.contracts.messages import Verdict
from shared.environments import Grading, Ungradable
from shared.environments.function import runs
from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.sandbox import CallResult, FunctionRun, Functions

# Exceptions that a verdict quotes by name: Python's, and those that the sandbox gives (shared.sandbox.slot). The agent may name an
# exception after hidden arguments, so others become OTHER.
NAMED = frozenset(
    name for name, found in vars(builtins).items() if isinstance(found, type) and issubclass(found, BaseException)
)
NAMED |= {"Timeout", "CpuLimit", "Died", "NotRun", "OutputLimit", "Unprintable", "Error"}
OTHER = "OtherError"
_FAILED_NAMED, _NAME = 20, 200  # cases that a verdict names, and characters of each name


class TaskError(Exception):
    """The agent's doing: its files cannot even be called. Scored as unsolved; the text is Verdict.error."""


def cases(problem: FunctionProblem, hidden: FunctionHidden) -> list[Case]:
    """Return the visible cases, then the hidden ones. Visible cases are cheap to pass, and the first failure ends the run."""
    return [*problem.visible, *hidden.cases]


def run_of(problem: FunctionProblem, hidden: FunctionHidden, files: Mapping[str, str]) -> FunctionRun:
    """Return the run of a state of the files. It stops at the first exception: the verdict cannot change any more, and most
    wrong candidates that hang would hang in every case. Raises TaskError, runs.NotRunnable."""
    try:
        return runs.run_of(problem, files, cases(problem, hidden), stop_at_error=True)
    except runs.FileGone:
        raise TaskError("MissingFile") from None


def judge(problem: FunctionProblem, hidden: FunctionHidden, results: Sequence[CallResult]) -> Verdict:
    """Compare results with expected values, type-exactly and outside the sandbox. `passed` counts up to the first exception. The
    verdict reveals nothing of a case but in `failed`, which is for a person alone."""
    expected = cases(problem, hidden)
    good = [runs.passes(case, result) for case, result in zip(expected, results, strict=True)]
    passed = sum(good)
    failed = [_named(problem, number, case) for number, case in enumerate(expected) if not good[number]]
    error = next((result.error for result in results if result.error), "")
    if error and error not in NAMED:
        error = OTHER
    return Verdict(
        solved=bool(expected) and passed == len(expected),
        passed=passed,
        total=len(expected),
        error=error,
        failed=failed[:_FAILED_NAMED],
    )


def _named(problem: FunctionProblem, number: int, case: Case) -> str:
    """Return what a person calls a case, e.g. `hidden case 2: calc [1, 2]`."""
    own = number - len(problem.visible)
    place = f"visible case {number + 1}" if own < 0 else f"hidden case {own + 1}"
    return f"{place}: {problem.entry} {case.args}"[:_NAME]


async def grade(functions: Functions, items: Sequence[Grading]) -> list[Verdict | Ungradable]:
    """Return one answer for each item, in order. All runs go to the sandbox together. Raises SandboxUnavailable."""
    planned = [_plan(item) for item in items]
    distinct = [
        list(dict.fromkeys(run for run in plan if isinstance(run, FunctionRun))) if isinstance(plan, list) else []
        for plan in planned
    ]
    flat = iter(await functions.run([run for wanted in distinct for run in wanted]))
    return [
        _verdict(item, plan, {run: next(flat) for run in wanted})
        for item, plan, wanted in zip(items, planned, distinct, strict=True)
    ]


def _plan(item: Grading) -> list[FunctionRun | Verdict] | Ungradable:
    """Return the run of the final state and, where it is to be graded too, of the state after the first edit. A state that
    cannot even be called has its verdict already."""
    states = [item.submission.files]
    if item.submission.first_edit_files is not None:
        states.append(item.submission.first_edit_files)
    plan: list[FunctionRun | Verdict] = []
    for files in states:
        try:
            plan.append(run_of(item.problem, item.hidden, files))
        except runs.NotRunnable as error:
            return Ungradable(str(error))
        except TaskError as error:
            total = len(cases(item.problem, item.hidden))
            plan.append(Verdict(solved=False, passed=0, total=total, error=str(error)))
    return plan


def _verdict(
    item: Grading, plan: list[FunctionRun | Verdict] | Ungradable, results: Mapping[FunctionRun, list[CallResult]]
) -> Verdict | Ungradable:
    if isinstance(plan, Ungradable):
        return plan
    final, *first = [
        run if isinstance(run, Verdict) else judge(item.problem, item.hidden, results[run]) for run in plan
    ]
    return msgspec.structs.replace(final, first_edit_solved=first[0].solved) if first else final
