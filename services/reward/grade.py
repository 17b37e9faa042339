"""A grading job, done: objects in, sandbox runs, verdicts out. Blocking; runs inside a Celery task."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import structlog

from services.reward import grading
from services.reward.behaviour import findings
from services.reward.jobs import Answer, Item, Job
from services.reward.packs import Packs
from shared.contracts.graded import Finding, Graded
from shared.contracts.messages import Verdict
from shared.contracts.trajectory import unpack
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.problems import Hidden, Problem
from shared.problems.pack import PackError
from shared.sandbox import CallResult, FunctionRun
from shared.sandbox.pool import FunctionPool

CANARY = FunctionRun(source="def f(): return 1", entry="f", args=("[]",))  # fails only where every run would

log = structlog.get_logger()


@dataclass(slots=True)
class _Prepared:
    """An attempt on its way through a job. `runs`: the final state and, for evaluations, the state after the first edit."""

    item: Item
    problem: Problem
    hidden: Hidden
    found: dict[str, Finding]
    runs: list[FunctionRun | Verdict]


class Grader:
    def __init__(self, objects: Objects, functions: FunctionPool, name: str) -> None:
        self._objects = objects
        self._functions = functions
        self._packs = Packs(objects)
        self._name = name

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
            except (ObjectMissing, ObjectDamaged, PackError, grading.Ungradable, ValueError) as error:
                results[i] = f"{type(error).__name__}: {error}"
        results.update(self._grade(prepared))
        answer = Answer(results=[results[i] for i in range(len(job.items))])
        self._objects.put(job.answer_key, msgspec.json.encode(answer))
        return answer

    def _grade(self, prepared: dict[int, _Prepared]) -> dict[int, Graded | str]:
        """All in one go. Where that fails although sandboxes work, half by half: what breaks them, or cannot be given to one, is
        found, and takes no other attempt along. Raises SandboxUnavailable where none works."""
        try:
            verdicts = self._run(list(prepared.values()))
        except Exception as error:  # whatever one of them brings about
            self._functions.run_sync([CANARY])
            log.warning("sandbox_broken", attempts=[a.item.key.attempt for a in prepared.values()], error=str(error))
            if len(prepared) == 1:
                return dict.fromkeys(prepared, f"{type(error).__name__}: {error}")
            entries = list(prepared.items())
            half = len(entries) // 2
            return self._grade(dict(entries[:half])) | self._grade(dict(entries[half:]))
        return {
            i: self._keep(attempt.item, Graded(verdict=verdict, findings=attempt.found, grader=self._name))
            for (i, attempt), verdict in zip(prepared.items(), verdicts, strict=True)
        }

    def _known(self, item: Item) -> Graded | None:
        try:
            return msgspec.json.decode(self._objects.get(self._objects.head(item.verdict_key)), type=Graded)
        except ObjectMissing:
            return None

    def _keep(self, item: Item, graded: Graded) -> Graded:
        """The first verdict wins, whoever wrote it."""
        if self._objects.put_if_absent(item.verdict_key, msgspec.json.encode(graded)) is None:
            return self._known(item) or graded
        return graded

    def _prepare(self, item: Item) -> _Prepared:
        if item.pack is None:
            raise PackError(f"no public pack is known for the hidden pack {item.pack_hidden.key}")
        problem, hidden = self._packs.problem(item.pack, item.pack_hidden, item.key.problem)
        trajectory = unpack(self._objects.get(item.trajectory))
        states = [trajectory.files]
        if trajectory.first_edit_files is not None:
            states.append(trajectory.first_edit_files)
        runs: list[FunctionRun | Verdict] = []
        for files in states:
            try:
                runs.append(grading.run_of(problem, hidden, files))
            except grading.TaskError as error:
                total = len(grading.cases(problem, hidden))
                runs.append(Verdict(solved=False, passed=0, total=total, error=str(error)))
        return _Prepared(item, problem, hidden, findings(trajectory, problem.files), runs)

    def _run(self, attempts: list[_Prepared]) -> list[Verdict]:
        """Every distinct state of every attempt in its own sandbox, all in one go."""
        wanted = [[run for run in a.runs if isinstance(run, FunctionRun)] for a in attempts]
        distinct = [list(dict.fromkeys(runs)) for runs in wanted]
        flat = iter(self._functions.run_sync([run for runs in distinct for run in runs]))
        verdicts = []
        for attempt, runs in zip(attempts, distinct, strict=True):
            results: dict[FunctionRun, list[CallResult]] = {run: next(flat) for run in runs}
            final, *first = [
                run if isinstance(run, Verdict) else grading.judge(attempt.problem, attempt.hidden, results[run])
                for run in attempt.runs
            ]
            verdicts.append(msgspec.structs.replace(final, first_edit_solved=first[0].solved) if first else final)
        return verdicts
