"""Gates the candidates of a source in the real grader, and keeps count of what became of each.

Two things happen at a time: the source looks for the next candidates while the grader works on the last ones.

The gate of a draft is whole, or short. Whole: the solution, no change and every cheat, as for any problem, with repeats. Short: the
solution once and no change once. Drafts of a source without `whole_gate` get the short one, and one in SAMPLE the whole. If a
whole gate refuses a draft for a cheat or for results that differ, all drafts of the project get the whole gate from then on, those
that were admitted before as well.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.curator.sources import Refused
from services.curator.sources.python import Bench, Draft, Rejected, Source
from services.curator.sources.python.contamination import Evaluations
from services.curator.sources.python.project import UNKNOWN, Project
from services.curator.sources.rows import finished, kept_tests
from shared.environments import Outcome, admission
from shared.environments.repository import RepositoryEnvironment
from shared.environments.repository.trees import TreeError
from shared.objects import Objects

SAMPLE = 25  # of so many drafts one gets the whole gate
_BATCH = 8  # drafts that are gated together
_AHEAD = 16  # drafts that wait for the gate

Progress = Callable[["Made"], None]


@dataclass(slots=True)
class Made:
    """`pairs`: admitted problems, both parts. `gates`: how many of them got which gate. `seconds`: of everything."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    gates: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def candidates(self) -> int:
        return len(self.pairs) + len(self.rejected)

    @property
    def reasons(self) -> Counter[str]:
        """Return the first words of the reasons, which are the same for all of a kind."""
        return Counter(one.reason.partition(":")[0] for one in self.rejected)


@dataclass(slots=True)
class Making:
    """One run. `most`: admitted problems, 0: no bound. `within_s`: no new batch begins after so many seconds. `whole`: every draft
    gets the whole gate."""

    source: Source
    project: Project
    bench: Bench
    environment: RepositoryEnvironment
    objects: Objects
    evaluations: Evaluations
    most: int = 0
    within_s: float = float("inf")
    whole: bool = False
    made: Made = field(default_factory=Made)
    _drafts: int = 0

    async def run(self, progress: Progress = lambda made: None) -> Made:
        """Raises SourceError where the project cannot be used, SandboxUnavailable, OSError."""
        self.evaluations.require_other(self.project)
        self.whole = self.whole or self.source.whole_gate
        started = time.monotonic()
        queue: asyncio.Queue[Draft | None] = asyncio.Queue(_AHEAD)
        producer = asyncio.create_task(self._produce(queue, progress))
        try:
            while not self._enough() and time.monotonic() - started < self.within_s:
                batch, over = await _next(queue, self._room())
                await self._gate(batch)
                self.made.seconds = time.monotonic() - started
                progress(self.made)
                if over:
                    break
        finally:
            if not producer.done():
                producer.cancel()
            ended = (await asyncio.gather(producer, return_exceptions=True))[0]
        if isinstance(ended, Exception):
            raise ended
        return self.made

    def _room(self) -> int:
        """Return how many drafts to gate next."""
        return min(_BATCH, self.most - len(self.made.pairs)) if self.most else _BATCH

    def _enough(self) -> bool:
        return bool(self.most) and len(self.made.pairs) >= self.most

    async def _produce(self, queue: asyncio.Queue[Draft | None], progress: Progress) -> None:
        found = self.source.candidates(self.project, self.bench)
        try:
            async for one in found:
                if isinstance(one, Rejected):
                    self.made.rejected.append(one)
                    progress(self.made)
                elif why := self.evaluations.objection(one.code):
                    self.made.rejected.append(Rejected(one.place, why))
                else:
                    await queue.put(one)
        finally:
            await found.aclose()  # type: ignore[attr-defined]
            if not (task := asyncio.current_task()) or not task.cancelling():
                await queue.put(None)

    async def _gate(self, drafts: Sequence[Draft]) -> None:
        short: list[tuple[Draft, Any, Any]] = []
        whole: list[tuple[Draft, Any, Any]] = []
        for draft in drafts:
            try:
                problem, hidden = await asyncio.to_thread(self._problem, draft)
            except (Refused, TreeError) as error:
                self.made.rejected.append(Rejected(draft.place, f"no problem: {error}"))
                continue
            sampled = self.whole or self._drafts % SAMPLE == 0
            (whole if sampled else short).append((draft, problem, hidden))
            self._drafts += 1
        found = [*await self._short(short), *await self._whole(whole)]
        for (draft, _, _), outcome, gate in found:
            if outcome.reason:
                self.made.rejected.append(
                    Rejected(draft.place, f"gate, {outcome.refused_by or 'objection'}: {outcome.reason}")
                )
            else:
                self.made.pairs.append((outcome.problem, outcome.hidden))
                self.made.gates[gate] += 1
        if not self.whole and any(gate == "whole" and _doubtful(outcome) for _, outcome, gate in found):
            await self._again()

    async def _short(self, some: Sequence[tuple[Draft, Any, Any]]) -> list[tuple[tuple[Draft, Any, Any], Outcome, str]]:
        environment = self.environment
        candidates = [
            admission.Candidate(problem, hidden, environment.oracle(problem, hidden)) for _, problem, hidden in some
        ]
        outcomes = await admission.admit(candidates, environment.grade, repeats=1)
        return [(one, outcome, "short") for one, outcome in zip(some, outcomes, strict=True)]

    async def _whole(self, some: Sequence[tuple[Draft, Any, Any]]) -> list[tuple[tuple[Draft, Any, Any], Outcome, str]]:
        outcomes = await self.environment.admit([(problem, hidden) for _, problem, hidden in some])
        return [(one, outcome, "whole") for one, outcome in zip(some, outcomes, strict=True)]

    async def _again(self) -> None:
        """Give the whole gate to what was admitted before."""
        self.whole = True
        pairs, self.made.pairs, self.made.gates = self.made.pairs, [], Counter()
        for start in range(0, len(pairs), _BATCH):
            for outcome in await self.environment.admit(pairs[start : start + _BATCH]):
                if outcome.reason:
                    self.made.rejected.append(
                        Rejected(outcome.problem.id, f"gate, {outcome.refused_by}: {outcome.reason}")
                    )
                else:
                    self.made.pairs.append((outcome.problem, outcome.hidden))
                    self.made.gates["whole"] += 1

    def _problem(self, draft: Draft) -> tuple[Any, Any]:
        """Return both parts. Raises Refused, TreeError."""
        fail, others = list(draft.fail_to_pass), list(draft.pass_to_pass)
        origin = f"{self.project.label}:{draft.place}"
        licence = self.project.licence
        public = {"category": draft.category, "prompt": draft.prompt, "cell": self.project.name, "origin": origin[:300]}
        found = finished(
            self.objects,
            draft.tree,
            draft.id,
            public={**public, "licence": licence if licence != UNKNOWN else "", "commit": draft.commit},
            hidden={
                "fail_to_pass": fail,
                "pass_to_pass": others,
                "tests": dict(draft.tests),
                "command": list(draft.command),
                "protected": kept_tests(fail, others, draft.tests),
                "solution": dict(draft.solution),
            },
        )
        return found.problem, found.hidden


def _doubtful(outcome: Outcome) -> bool:
    return outcome.refused_by.startswith("cheat") or "disagree" in outcome.reason


async def _next(queue: asyncio.Queue[Draft | None], most: int) -> tuple[list[Draft], bool]:
    """Return the drafts that wait, one to `most`, and whether there will be no more."""
    batch: list[Draft] = []
    while True:
        one = await queue.get()
        if one is None:
            return batch, True
        batch.append(one)
        if len(batch) >= most or queue.empty():
            return batch, False
