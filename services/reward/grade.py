"""A grading job, done: objects in, sandbox runs, verdicts out. Blocking; runs inside a Celery task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.reward.batches import graded_together
from services.reward.behaviour import Behaviour, observed
from services.reward.formats import Formats
from services.reward.jobs import Answer, Item, Job, Unreadable
from services.reward.judge import Judge, Question
from services.reward.packs import Packs
from services.reward.score import JUDGE
from services.reward.term_worker import Look, Tool
from services.reward.term_workers import TermWorkers
from shared import terms
from shared.contracts.graded import Graded
from shared.contracts.messages import Verdict
from shared.contracts.trajectory import Submission, Trajectory, unpack
from shared.environments import Brief, Environment, Grading, InfrastructureError
from shared.environments.registry import Environments
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems.pack import PackError
from shared.problems.schema import Problem
from shared.sandbox import SandboxUnavailable
from shared.terms import Seen


@dataclass(slots=True)
class _Prepared:
    """An attempt on its way through a job."""

    item: Item
    kind: str
    grading: Grading
    behaviour: Behaviour
    question: Question  # for the judge


class Grader:
    """`workers`: compute the terms in a process that can be killed; None: they are computed in this one, and those that need the
    text of the attempt have no answer. `formats`: of the runs; None: no text can be read. `judge`: None: none is asked."""

    def __init__(
        self,
        objects: Objects,
        environments: Environments,
        name: str,
        *,
        workers: TermWorkers | None = None,
        formats: Formats | None = None,
        judge: Judge | None = None,
    ) -> None:
        self._objects = objects
        self._environments = environments
        self._packs = Packs(objects)
        self._name = name
        self._workers, self._formats, self._judge = workers, formats, judge

    def work(self, job: Job) -> Answer:
        """Leaves a verdict for every attempt that can be graded, and the answer. Failures of infrastructure that concern
        single attempts are reasons in the answer. Raises what the object store raises, and SandboxUnavailable where no
        sandbox works here any more: there is no answer then, since that says nothing about any attempt."""
        results: dict[int, Graded | str] = {}
        prepared: dict[int, _Prepared] = {}
        for i, item in enumerate(job.items):
            try:
                if (known := self._known(item)) is not None:
                    results[i] = known
                else:
                    prepared[i] = self._prepare(item)
            except (ObjectMissing, ObjectDamaged, PackError, InfrastructureError, ValueError) as error:
                results[i] = f"{type(error).__name__}: {error}"
        self._ask_judge(list(prepared.values()))
        for kind in {attempt.kind for attempt in prepared.values()}:
            results.update(self._grade(kind, {i: a for i, a in prepared.items() if a.kind == kind}))
        answer = Answer(results=[results[i] for i in range(len(job.items))])
        self._objects.put(job.answer_key, msgspec.json.encode(answer))
        return answer

    def _ask_judge(self, prepared: Sequence[_Prepared]) -> None:
        if self._judge is not None and prepared:
            answers = self._judge.findings([attempt.question for attempt in prepared])
            for attempt, answer in zip(prepared, answers, strict=True):
                attempt.behaviour.add(JUDGE, answer)

    def _grade(self, kind: str, prepared: dict[int, _Prepared]) -> dict[int, Graded | str]:
        """Grade attempts at problems of one kind in one go. Raises SandboxUnavailable where no sandbox works."""
        answers = graded_together(self._environments, kind, [attempt.grading for attempt in prepared.values()])
        return {
            i: answer if isinstance(answer, str) else self._kept(attempt, answer)
            for (i, attempt), answer in zip(prepared.items(), answers, strict=True)
        }

    def _kept(self, attempt: _Prepared, verdict: Verdict) -> Graded:
        graded = Graded(
            verdict=msgspec.structs.replace(
                verdict, failed=[]
            ),  # many services read verdicts, and tests are hidden from most
            findings=attempt.behaviour.findings,
            grader=self._name,
            quarantined=attempt.behaviour.quarantined,
            terms=computed() if self._judge is None else [*computed(), JUDGE],
        )
        return self._keep(attempt.item, graded)

    def _known(self, item: Item) -> Graded | None:
        try:
            return msgspec.json.decode(self._objects.get(self._objects.head(item.verdict_key)), type=Graded)
        except ObjectMissing:
            return None

    def _keep(self, item: Item, graded: Graded) -> Graded:
        """Keep the first verdict on this trajectory, whoever wrote it."""
        if self._objects.put_if_absent(item.verdict_key, msgspec.json.encode(graded)) is None:
            return self._known(item) or graded
        return graded

    def _trajectory(self, item: Item) -> tuple[bytes, Trajectory]:
        """Return the trajectory, packed and unpacked. Raises Unreadable."""
        try:
            packed = self._objects.get(item.trajectory)
            return packed, unpack(packed)
        except (ObjectMissing, ObjectDamaged, ValueError) as error:
            raise Unreadable(f"{type(error).__name__}: {error}") from error

    def _prepare(self, item: Item) -> _Prepared:
        if item.pack is None:
            raise PackError(f"no public pack is known for the hidden pack {item.pack_hidden.key}")
        problem, hidden = self._packs.problem(item.pack, item.pack_hidden, item.key.problem)
        packed, trajectory = self._trajectory(item)
        environment = self._environments.of(problem)
        submission = trajectory.submission
        given, brief = _told(environment, problem, submission)
        if self._workers is None:
            behaviour = observed(Seen(trajectory, given), computed())
        else:
            folder, why = self._formats.of(item.run) if self._formats is not None else ("", "")
            behaviour = self._workers.look(look_of(packed, given, brief, folder, why, problem.task))
        question = Question(problem.task or task_of(brief), given, Seen(trajectory, given).after)
        return _Prepared(item, problem.kind, Grading(problem, hidden, submission), behaviour, question)


def _told(
    environment: Environment[Any, Any], problem: Problem, submission: Submission
) -> tuple[Mapping[str, str], Brief]:
    """Return the submitted files as they were given, and what the agent was told. Raises InfrastructureError where the environment,
    which may come from another package, breaks: that concerns this attempt alone."""
    try:
        return environment.given(problem, [*submission.files, *submission.changes]), environment.brief(problem)
    except (OSError, InfrastructureError, SandboxUnavailable, ObjectMissing, ObjectDamaged):
        raise
    except Exception as error:
        said = f"environment {problem.kind!r}: {type(error).__name__}: {error}"
        raise InfrastructureError(said) from error


def computed() -> list[str]:
    """Return the terms that are computed from an attempt alone: all but the judge's."""
    return [name for name in terms.names() if name != JUDGE]


def task_of(brief: Brief) -> str:
    return "\n".join(message.content for message in brief.messages if message.role == "user")


def look_of(
    packed: bytes, given: Mapping[str, str], brief: Brief, folder: str, unreadable: str, task: str = ""
) -> Look:
    """Return what the terms look at. `folder`: of the run's tokenizer; the empty string: `unreadable` says why there is none.
    `task`: empty: what the brief tells."""
    return Look(
        names=computed(),
        trajectory=packed,
        before=dict(given),
        tools=[Tool(tool.name, tool.description, dict(tool.parameters), tool.effect) for tool in brief.tools],
        task=task or task_of(brief),
        checkpoint=folder,
        unreadable=unreadable,
    )
