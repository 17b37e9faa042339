"""What the demo has seen of a run: a pure fold over messages, so that it can be rebuilt from the bus at any time.

Counts are of distinct things (attempt and epoch, group, step), because the bus delivers at least once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shared.contracts import messages as m
from shared.contracts.run import Purpose


@dataclass(slots=True)
class Step:
    step: int
    serial: int
    at: float  # seconds, wall clock
    metrics: dict[str, float]
    age: int  # greatest age of a sample in it, in steps


@dataclass(slots=True)
class Progress:
    requested: set[tuple[str, int]] = field(default_factory=set)
    finished: set[tuple[str, int]] = field(default_factory=set)
    scored: dict[str, tuple[float, bool]] = field(default_factory=dict)  # attempt -> (reward, solved), first verdict
    groups: set[str] = field(default_factory=set)
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)  # serial -> when seen
    serving: dict[str, m.PolicyApplied] = field(default_factory=dict)
    evaluations: dict[str, m.EvalFinished] = field(default_factory=dict)
    alerts: list[m.Alert] = field(default_factory=list)
    first_request: float | None = None
    last_publication: float | None = None
    evaluated: int = 0  # attempts scored for evaluations
    tokens: int = 0
    state: str = ""  # last action of runs.control
    recent: deque[tuple[float, bool, int]] = field(default_factory=lambda: deque(maxlen=512))  # (at, solved, tokens)

    def see(self, message: Any, at: float) -> None:
        """`at`: when it was published, seconds."""
        match message:
            case m.RolloutRequested(key=key) if key.purpose is Purpose.train:
                self.requested.add((key.attempt, key.epoch))
                self.first_request = min(at, self.first_request or at)
            case m.RolloutFinished(key=key) if key.purpose is Purpose.train:
                self.finished.add((key.attempt, key.epoch))
            case m.RolloutScored(key=key) if key.purpose is Purpose.train:
                if key.attempt not in self.scored:
                    self.scored[key.attempt] = (message.reward, message.verdict.solved)
                    self.tokens += message.effort.sampled_tokens
                    self.recent.append((at, message.verdict.solved, message.effort.sampled_tokens))
            case m.RolloutScored():
                self.evaluated += 1
                self.recent.append((at, message.verdict.solved, message.effort.sampled_tokens))
            case m.GroupReady():
                self.groups.add(message.group)
            case m.StepCommitted():
                self.steps[message.incarnation, message.step] = Step(
                    message.step, message.serial, at, message.metrics, max(message.groups.values(), default=0)
                )
            case m.PolicyPublished():
                self.published.setdefault(message.serial, at)
                if message.step > 0:
                    self.last_publication = max(at, self.last_publication or at)
            case m.PolicyApplied():
                self.serving[message.replica] = message
            case m.EvalFinished():
                self.evaluations[message.eval] = message
            case m.RunControl():
                self.state = message.action
            case m.Alert():
                self.alerts.append(message)

    @property
    def lineage(self) -> list[Step]:
        """Committed steps of the surviving lineage: the newest incarnation's word counts for each step."""
        newest: dict[int, tuple[int, Step]] = {}
        for (incarnation, number), step in self.steps.items():
            if number not in newest or incarnation > newest[number][0]:
                newest[number] = (incarnation, step)
        return [step for _, (_, step) in sorted(newest.items())]

    @property
    def newest_serial(self) -> int:
        return max(self.published, default=0)

    @property
    def minutes(self) -> float:
        """First request to last publication."""
        if self.first_request is None or self.last_publication is None:
            return 0.0
        return max(0.0, self.last_publication - self.first_request) / 60

    def rates(self, now: float, window_s: float = 30.0) -> tuple[float, float, float]:
        """(share solved, sampled tokens per second, attempts per second) over the last scored attempts."""
        rows = [row for row in self.recent if now - row[0] <= window_s]
        if not rows:
            return 0.0, 0.0, 0.0
        span = max(1.0, min(window_s, now - rows[0][0]))
        return sum(r[1] for r in rows) / len(rows), sum(r[2] for r in rows) / span, len(rows) / span

    def counts(self) -> dict[str, int]:
        """Distinct messages per topic, training only; the ledger must know the same numbers."""
        return {
            "rollouts.requested": len(self.requested),
            "rollouts.finished": len(self.finished),
            "rollouts.scored": len(self.scored),
            "groups.ready": len(self.groups),
            "steps.committed": len(self.steps),
        }
