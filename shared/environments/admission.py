"""Admission: what graders must say of a problem before anybody practises on it. The same for every environment.

A solution scores 1, no change scores 0, every cheat scores 0, and repeated gradings agree. Each is graded exactly as
attempts are graded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Submission
from shared.environments import Environment, Grading, Outcome, Ungradable
from shared.environments.answering import require_one_each
from shared.sandbox import SandboxUnavailable

REPEATS = 3
OF_THE_MACHINE = (SandboxUnavailable, OSError)  # tried again later; every other error is a problem's own

Grade = Callable[[Sequence[Grading]], Awaitable[list[Verdict | Ungradable]]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A problem to admit. `oracle`: its solution; None: none is known. `cheats`: name -> a submission that solves nothing.
    `no_op`: what is submitted by an agent that does nothing."""

    problem: Any
    hidden: Any
    oracle: Submission | None
    cheats: Mapping[str, Submission] = field(default_factory=dict)
    no_op: Submission = field(default_factory=Submission)


Parts = Callable[
    [Any, Any], Mapping[str, Candidate]
]  # problem, hidden -> the name of each part, and what to admit for it


@dataclass(frozen=True, slots=True)
class Refusal:
    """`by`: the submission whose grading refused the problem, such as "oracle"; empty: the problem could not be checked."""

    reason: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class _Trial:
    what: str
    submission: Submission


async def admit(candidates: Sequence[Candidate], grade: Grade, repeats: int = REPEATS) -> list[Outcome]:
    """Return one outcome for each candidate, in order. A problem that is refused, or that makes `grade` fail, is graded no
    further. Raises SandboxUnavailable, OSError."""
    refusals: list[Refusal | None] = [None] * len(candidates)
    for trials in (_oracles, _no_ops, _cheats):
        planned = [[] if refused else trials(one, repeats) for one, refused in zip(candidates, refusals, strict=True)]
        found = await _run(candidates, planned, grade)
        refusals = [before or after for before, after in zip(refusals, found, strict=True)]
    return [
        Outcome(one.problem, one.hidden, refused.reason, refused_by=refused.by)
        if refused
        else Outcome(one.problem, one.hidden, proven=one.oracle is not None)
        for one, refused in zip(candidates, refusals, strict=True)
    ]


async def admitted(
    environment: Environment[Any, Any],
    pairs: Sequence[tuple[Any, Any]],
    objection: Callable[[Any, Any], str | None] | None = None,
    parts: Parts | None = None,
    grade: Grade | None = None,
) -> list[Outcome]:
    """Return one outcome for each problem, in order. `objection`: says of a problem and its hidden part why they cannot be
    graded, or None; left out: `environment.objection` alone is asked. `parts`: splits a problem into parts that each earn
    something; every part must be admitted. Left out: a problem has one part, with the environment's oracle and cheats. `grade`:
    grades the parts; left out: `environment.grade`. A problem that the environment objects to is not graded. A problem that makes
    the environment fail is refused with the error; the others go on. Raises SandboxUnavailable and OSError: they say something
    of the machine, not of a problem."""

    def whole(problem: Any, hidden: Any) -> Mapping[str, Candidate]:
        return {
            "": Candidate(problem, hidden, environment.oracle(problem, hidden), environment.cheats(problem, hidden))
        }

    found = [_parts(environment, problem, hidden, objection, parts or whole) for problem, hidden in pairs]
    candidates = [one for some in found if not isinstance(some, Outcome) for one in some.values()]
    outcomes = iter(await admit(candidates, grade or environment.grade))
    return [
        some if isinstance(some, Outcome) else _joined(problem, hidden, {name: next(outcomes) for name in some})
        for (problem, hidden), some in zip(pairs, found, strict=True)
    ]


def _joined(problem: Any, hidden: Any, outcomes: Mapping[str, Outcome]) -> Outcome:
    """Return the outcome of a problem: the first refusal of its parts, under the name of the part."""
    for name, one in outcomes.items():
        if one.reason:
            reason = f"{name}: {one.reason}" if name else one.reason
            return Outcome(problem, hidden, reason, refused_by=one.refused_by)
    return Outcome(problem, hidden, proven=all(one.proven for one in outcomes.values()))


def _parts(
    environment: Environment[Any, Any],
    problem: Any,
    hidden: Any,
    objection: Callable[[Any, Any], str | None] | None,
    parts: Parts,
) -> Mapping[str, Candidate] | Outcome:
    """Return what to grade, or the refusal of a problem that cannot be."""
    try:
        if why := environment.objection(problem) or (objection and objection(problem, hidden)):
            return Outcome(problem, hidden, why)
        return parts(problem, hidden)
    except OF_THE_MACHINE:
        raise
    except Exception as error:
        return Outcome(problem, hidden, _failed(error))


def _oracles(candidate: Candidate, repeats: int) -> list[_Trial]:
    return [_Trial("oracle", candidate.oracle)] * repeats if candidate.oracle is not None else []


def _no_ops(candidate: Candidate, repeats: int) -> list[_Trial]:
    return [_Trial("no-op", candidate.no_op)] * repeats


def _cheats(candidate: Candidate, repeats: int) -> list[_Trial]:
    return [_Trial(f"cheat {name!r}", submission) for name, submission in candidate.cheats.items()]


async def _run(candidates: Sequence[Candidate], trials: Sequence[list[_Trial]], grade: Grade) -> list[Refusal | None]:
    """Grade all trials together. Return each candidate's refusal; None: there is none. Where that
    fails, grade each candidate by itself, to refuse the one that makes it fail."""
    gradings = [
        [Grading(candidate.problem, candidate.hidden, trial.submission) for trial in mine]
        for candidate, mine in zip(candidates, trials, strict=True)
    ]
    together = [grading for mine in gradings for grading in mine]
    try:
        found = await grade(together) if together else []
        require_one_each(together, found, "verdicts")
    except OF_THE_MACHINE:
        raise
    except Exception as error:
        if len(candidates) == 1:
            return [Refusal(_failed(error))]
        alone = zip(candidates, trials, strict=True)
        return [(await _run([candidate], [mine], grade))[0] for candidate, mine in alone]
    answers = iter(found)
    return [refusal([(trial.what, next(answers)) for trial in mine]) for mine in trials]


def _failed(error: Exception) -> str:
    return f"could not be checked: {type(error).__name__}: {error!s:.500}"


def refusal(answers: Sequence[tuple[str, Verdict | Ungradable]]) -> Refusal | None:
    """Return why the gradings of one problem refuse it, with what was seen; None: they do not. Pure."""
    verdicts: dict[str, list[Verdict]] = {}
    for what, answer in answers:
        if isinstance(answer, Ungradable):
            return Refusal(f"{what}: could not be graded: {answer.reason}", what)
        verdicts.setdefault(what, []).append(answer)
    for what, found in verdicts.items():
        if why := _wrong(what, found):
            return Refusal(f"{what}: {why}", what)
    return None


def _wrong(what: str, found: Sequence[Verdict]) -> str | None:
    seen = ", ".join(sorted({_seen(one) for one in found}))
    if len({(one.solved, one.passed, one.total) for one in found}) > 1:
        return f"{len(found)} gradings disagree: {seen}; allowed: one result, whenever it is graded"
    if what == "oracle":
        return None if found[0].solved else f"the solution is not solved: {seen}; allowed: every named test passes"
    if not found[0].solved:
        return None
    if what == "no-op":
        return f"the tree as given passes every test: {seen}; nothing is to be done"
    return f"scores as solved: {seen}; allowed: 0 for what solves nothing"


def _seen(verdict: Verdict) -> str:
    return f"{verdict.passed} of {verdict.total} tests passed" + (f" ({verdict.error})" if verdict.error else "")
