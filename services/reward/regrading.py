"""Grades recorded submissions once more, in sandboxes of this process. Blocking.

Invariant: a failure of infrastructure is tried again, TRIES times in all, and then a reason; it is never a verdict.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Engine, select

from services.reward.batches import graded_together
from services.reward.packs import Packs
from services.reward.rescore import Record
from shared.contracts.messages import Verdict
from shared.contracts.run import Ref
from shared.contracts.trajectory import unpack
from shared.environments import Grading, InfrastructureError
from shared.environments.registry import Environments
from shared.ledger.models import Pack, Problem
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems.schema import ProblemError

TRIES = 4  # as the reward service by default
FIRST_DELAY_S = 1.0  # doubles with every try
BATCH = 16  # submissions between two writes of the file


class Unreadable(Exception):
    """The record of an attempt cannot be graded, however often it is tried; the text says why."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One submission to grade again. `trajectory`: None: the ledger names none."""

    record: Record
    trajectory: Ref | None


def packs_of(engine: Engine, run: str) -> dict[str, tuple[Ref, Ref]]:
    """Return the public and the hidden pack of every problem of a run."""
    wanted = (
        select(Problem.problem_id, Pack.pack, Pack.pack_hidden)
        .join(Pack, (Pack.run_id == Problem.run_id) & (Pack.pack_hash == Problem.pack_hash))
        .where(Problem.run_id == run)
    )
    with engine.begin() as connection:
        return {row[0]: (row[1], row[2]) for row in connection.execute(wanted)}


class Regrader:
    """`refs`: the packs of each problem. `tests`: packs that are used instead of them; None: each problem's own."""

    def __init__(
        self,
        objects: Objects,
        environments: Environments,
        packs: Packs,
        refs: Mapping[str, tuple[Ref, Ref]],
        tests: tuple[Ref | None, Ref | None] = (None, None),
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._objects, self._environments = objects, environments
        self._packs, self._refs, self._tests = packs, refs, tests
        self._wait = wait

    def graded(self, submissions: Sequence[Recorded]) -> Iterator[list[tuple[Recorded, Verdict | str]]]:
        """Yield the answers batch by batch: a verdict, or the reason why there is none. Raises SandboxUnavailable."""
        for start in range(0, len(submissions), BATCH):
            batch = submissions[start : start + BATCH]
            yield list(zip(batch, self._batch(batch), strict=True))

    def _batch(self, batch: Sequence[Recorded]) -> list[Verdict | str]:
        answers: dict[int, Verdict | str] = {}
        open_: dict[int, Recorded] = dict(enumerate(batch))
        for number in range(TRIES):
            if number:
                self._wait(FIRST_DELAY_S * 2 ** (number - 1))
            answers.update(self._once(open_))
            open_ = {i: one for i, one in open_.items() if isinstance(answers[i], _Again)}
            if not open_:
                break
        return [str(answer) if isinstance(answer, str) else answer for _, answer in sorted(answers.items())]

    def _once(self, submissions: Mapping[int, Recorded]) -> dict[int, Verdict | str]:
        answers: dict[int, Verdict | str] = {}
        kinds: dict[str, dict[int, Grading]] = defaultdict(dict)
        for i, one in submissions.items():
            try:
                grading = self._grading(one)
                kinds[grading.problem.kind][i] = grading
            except Unreadable as error:
                answers[i] = str(error)
            except (OSError, InfrastructureError) as error:
                answers[i] = _Again(f"{type(error).__name__}: {error}")
        for kind, gradings in kinds.items():
            found = graded_together(self._environments, kind, list(gradings.values()))
            for i, answer in zip(gradings, found, strict=True):
                answers[i] = _Again(answer) if isinstance(answer, str) else answer
        return answers

    def _grading(self, one: Recorded) -> Grading:
        """Raises Unreadable, OSError, InfrastructureError."""
        record = one.record
        try:
            if one.trajectory is None:
                raise Unreadable("the ledger names no trajectory")
            public, hidden = self._tests
            if public is None or hidden is None:
                if record.problem not in self._refs:
                    raise Unreadable(f"the ledger names no pack of problem {record.problem!r}")
                own = self._refs[record.problem]
                public, hidden = public or own[0], hidden or own[1]
            problem, secret = self._packs.problem(public, hidden, record.problem)
            submission = unpack(self._objects.get(one.trajectory)).submission
        except (ObjectMissing, ObjectDamaged, ProblemError, ValueError) as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from None
        return Grading(problem, secret, submission)


class _Again(str):
    """A reason that may have gone by the next try."""

    __slots__ = ()
