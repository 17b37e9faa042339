"""Admission: a problem is refused with the first thing that is wrong, and what was seen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Submission
from shared.environments import Grading, Outcome, Ungradable
from shared.environments.admission import Candidate, admit, admitted
from shared.sandbox import SandboxUnavailable

ORACLE, CHEAT = Submission(files={"a": "right"}), Submission(files={"a": "cheat"})
GOOD, BAD = Verdict(solved=True, passed=2, total=2), Verdict(solved=False, passed=1, total=2)


def of(judge: Callable[[Submission, int], Verdict | Ungradable], oracle: Submission | None = ORACLE) -> Outcome:
    """What admission says where a grader gives `judge(submission, number of its grading)`."""
    counts: dict[int, int] = {}

    async def grade(items: Sequence[Grading]) -> list[Verdict | Ungradable]:
        answers = []
        for item in items:
            counts[id(item.submission)] = counts.get(id(item.submission), -1) + 1
            answers.append(judge(item.submission, counts[id(item.submission)]))
        return answers

    candidate = Candidate("problem", "hidden", oracle, {"forge": CHEAT})
    return asyncio.run(admit([candidate], grade))[0]


def honest(submission: Submission, number: int) -> Verdict:
    return GOOD if submission is ORACLE else BAD


def test_a_good_problem_is_admitted_and_proven_only_by_a_solution() -> None:
    assert of(honest) == Outcome("problem", "hidden", "", proven=True)
    assert of(honest, oracle=None) == Outcome("problem", "hidden", "", proven=False)


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (lambda s, n: BAD, "oracle: the solution is not solved: 1 of 2 tests passed; allowed: every named test passes"),
        (
            lambda s, n: Verdict(solved=False, passed=0, total=2, error="Timeout") if s is ORACLE else BAD,
            "oracle: the solution is not solved: 0 of 2 tests passed (Timeout); allowed: every named test passes",
        ),
        (lambda s, n: GOOD, "no-op: the tree as given passes every test: 2 of 2 tests passed; nothing is to be done"),
        (
            lambda s, n: GOOD if s is ORACLE and n < 2 else BAD,
            "oracle: 3 gradings disagree: 1 of 2 tests passed, 2 of 2 tests passed; allowed: one result, whenever it is graded",
        ),
        (
            lambda s, n: GOOD if s in (ORACLE, CHEAT) else BAD,
            "cheat 'forge': scores as solved: 2 of 2 tests passed; allowed: 0 for what solves nothing",
        ),
        (
            lambda s, n: Ungradable("no disk") if s is CHEAT else honest(s, n),
            "cheat 'forge': could not be graded: no disk",
        ),
    ],
)
def test_a_bad_problem_is_refused_with_what_was_seen(
    judge: Callable[[Submission, int], Verdict | Ungradable], reason: str
) -> None:
    outcome = of(judge)
    assert outcome.reason == reason
    assert outcome.refused_by == reason.partition(":")[0]


class Touchy:
    """An environment whose `broken` problem makes one method fail, always."""

    def __init__(self, failing: str, error: Exception) -> None:
        self._failing, self._error = failing, error

    def _at(self, place: str, problem: str) -> None:
        if problem == "broken" and place == self._failing:
            raise self._error

    def objection(self, problem: str) -> str | None:
        self._at("objection", problem)
        return None

    def oracle(self, problem: str, hidden: str) -> Submission | None:
        self._at("oracle", problem)
        return ORACLE

    def cheats(self, problem: str, hidden: str) -> dict[str, Submission]:
        self._at("cheats", problem)
        return {"forge": CHEAT}

    async def grade(self, items: Sequence[Grading]) -> list[Verdict | Ungradable]:
        for item in items:
            self._at("grade", item.problem)
        return [honest(item.submission, 0) for item in items]


@pytest.mark.parametrize("failing", ["objection", "oracle", "cheats", "grade"])
def test_a_problem_that_makes_the_environment_fail_is_refused_and_no_other(failing: str) -> None:
    environment: Any = Touchy(failing, RecursionError("too deep"))
    pairs = [(name, "hidden") for name in ("one", "broken", "two")]
    outcomes = asyncio.run(admitted(environment, pairs))
    assert not any(outcome.refused_by for outcome in outcomes)
    assert [outcome.reason for outcome in outcomes] == [
        "",
        "could not be checked: RecursionError: too deep",
        "",
    ]


@pytest.mark.parametrize("failing", ["cheats", "grade"])
@pytest.mark.parametrize("error", [SandboxUnavailable("no bwrap"), ConnectionError("store away")])
def test_what_the_machine_refuses_is_no_fault_of_a_problem(failing: str, error: Exception) -> None:
    environment: Any = Touchy(failing, error)
    with pytest.raises(type(error)):
        asyncio.run(admitted(environment, [("one", "hidden"), ("broken", "hidden")]))
