"""What the demo has seen of a run: a pure fold over messages, so that it can be rebuilt from the bus at any time.

Counts are of distinct things (attempt and epoch, group, step), because the bus delivers at least once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from shared.contracts import messages as m
from shared.contracts.life import RunState
from shared.contracts.run import Purpose
from shared.contracts.statuses import Statuses

DEMO = "etude demo"  # who gave the demo's own commands


@dataclass(slots=True)
class Step:
    step: int
    serial: int
    at: float  # seconds, wall clock
    metrics: dict[str, float]
    age: int  # greatest age of a sample in it, in steps


@dataclass(slots=True)
class Tally:
    """Scored attempts of one phase: of practice, or of the evaluation of one version. Each counts once."""

    attempts: dict[str, bool] = field(default_factory=dict)  # attempt -> solved, first verdict
    tokens: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=512))  # (at, sampled tokens)

    def see(self, scored: m.RolloutScored, at: float) -> None:
        if scored.key.attempt not in self.attempts:
            self.attempts[scored.key.attempt] = scored.verdict.solved
            self.tokens += scored.effort.sampled_tokens
            self.recent.append((at, scored.effort.sampled_tokens))

    @property
    def solved_share(self) -> float:
        """Of all so far."""
        return sum(self.attempts.values()) / len(self.attempts) if self.attempts else 0.0

    def rates(self, now: float, window_s: float = 30.0) -> tuple[float, float]:
        """(sampled tokens, attempts) per second, lately."""
        rows = [row for row in self.recent if now - row[0] <= window_s]
        if not rows:
            return 0.0, 0.0
        span = max(1.0, min(window_s, now - rows[0][0]))
        return sum(tokens for _, tokens in rows) / span, len(rows) / span


@dataclass(slots=True)
class Progress:
    requested: set[tuple[str, int]] = field(default_factory=set)
    finished: set[tuple[str, int]] = field(default_factory=set)
    practice: Tally = field(default_factory=Tally)
    evaluated: defaultdict[int, Tally] = field(default_factory=lambda: defaultdict(Tally))  # by the version evaluated
    groups: set[str] = field(default_factory=set)
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)  # serial -> when seen
    serving: dict[str, m.PolicyApplied] = field(default_factory=dict)
    evaluations: dict[str, m.EvalFinished] = field(default_factory=dict)
    alerts: list[m.Alert] = field(default_factory=list)
    first_request: float | None = None
    last_publication: float | None = None
    state: RunState = RunState.announced
    paused_by: str = ""  # whose command or decision it was, and why; of the last pause
    paused_since: float | None = None
    pauses: list[tuple[float, float]] = field(default_factory=list)  # (from, to) of those that are over
    statuses: Statuses = field(default_factory=Statuses)

    def see(self, message: Any, at: float) -> None:
        """`at`: when it was published, seconds."""
        match message:
            case m.RolloutRequested(key=key) if key.purpose is Purpose.train:
                self.requested.add((key.attempt, key.epoch))
                self.first_request = min(at, self.first_request or at)
            case m.RolloutFinished(key=key) if key.purpose is Purpose.train:
                self.finished.add((key.attempt, key.epoch))
            case m.RolloutScored(key=key) if key.purpose is Purpose.train:
                self.practice.see(message, at)
            case m.RolloutScored():
                self.evaluated[message.oldest_version].see(message, at)
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
            case m.RunStatus() if self.statuses.hear(message):
                self._enter(message)
            case m.Alert():
                self.alerts.append(message)

    def _enter(self, status: m.RunStatus) -> None:
        if status.state is self.state:
            return
        if status.state is RunState.paused:
            self.paused_by = f"{status.by or 'somebody'}{f': {status.reason}' if status.reason else ''}"
            self.paused_since = status.since
        elif self.paused_since is not None:
            self.pauses.append((self.paused_since, status.since))
            self.paused_since = None
        self.state = status.state

    @property
    def turned_down(self) -> str:
        """Why the scheduler ended the run before it asked for an attempt; empty where it did not."""
        if self.state is not RunState.finished or self.first_request is not None:
            return ""
        why = [alert for alert in self.alerts if alert.name == "configuration"]
        return "; ".join([why[-1].what, *why[-1].examples]) if why else ""

    @property
    def paused(self) -> bool:
        return self.state is RunState.paused

    def practised(self, now: float) -> float:
        """Seconds since the first request for which the run was not paused: the clock of its budget stands meanwhile."""
        if self.first_request is None:
            return 0.0
        pauses = [*self.pauses, *([(self.paused_since, now)] if self.paused_since is not None else [])]
        stood = sum(max(0.0, end - max(start, self.first_request)) for start, end in pauses)
        return max(0.0, now - self.first_request - stood)

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

    def counts(self) -> dict[str, int]:
        """Distinct messages per topic, training only; the ledger must know the same numbers."""
        return {
            "rollouts.requested": len(self.requested),
            "rollouts.finished": len(self.finished),
            "rollouts.scored": len(self.practice.attempts),
            "groups.ready": len(self.groups),
            "steps.committed": len(self.steps),
        }
