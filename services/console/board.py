"""What the messages say, added up for the pages. Pure: no input or output, no clock.

Applying a message twice, or all of them again from the start, gives the same board.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from services.console.control import Done, commanded, decided
from services.console.seen import Seen
from shared.contracts import messages as m
from shared.contracts.life import RunState
from shared.contracts.run import Purpose
from shared.contracts.statuses import Statuses

ALERTS = 200  # the newest are kept
DONE = 200  # actions on a run that are kept
EXAMPLES = 200  # recent attempts that the figure "lately" is made of
LISTED_RUNS = 20  # that practised last; of the others' attempts the figures are kept alone


class Tally(msgspec.Struct, gc=False):
    """Training attempts whose oldest token was sampled by one version.

    It and Step stay out of the garbage collector, which would walk through one of each per step of every run (a quarter of a
    second for 1,000 runs) while a page waits: neither can be part of a cycle."""

    attempts: int = 0
    solved: int = 0
    reward: float = 0.0
    sampled_tokens: int = 0
    tool_calls: int = 0
    broken_tool_calls: int = 0

    def add(self, scored: m.RolloutScored) -> None:
        self.attempts += 1
        self.solved += scored.verdict.solved
        self.reward += scored.reward
        self.sampled_tokens += scored.effort.sampled_tokens
        self.tool_calls += scored.effort.tool_calls
        self.broken_tool_calls += scored.effort.broken_tool_calls


class Step(msgspec.Struct, frozen=True, gc=False):
    """What the pages need of a commit. `age`: the greatest of a sample that it trained, in steps. `groups`: those that it
    trained, a hash of 8 bytes each."""

    age: int
    metrics: Mapping[str, float]
    groups: bytes = b""

    def trained(self, group: str) -> bool:
        digest = _digest(group)
        return any(self.groups[i : i + 8] == digest for i in range(0, len(self.groups), 8))


def _digest(group: str) -> bytes:
    return xxhash.xxh3_64_digest(group.encode("utf-8", "surrogatepass"))


@dataclass(slots=True)
class RunBoard:
    """One run. `steps` holds the surviving lineage only."""

    run: str
    state: RunState = RunState.announced
    reason: str = ""
    answered: str = ""  # id of the command that the scheduler has answered last
    beside: bool = False  # it was started beside others, and has a trainer and engines of its own
    done: list[Done] = field(default_factory=list)  # the newest commands and decisions, by time
    incarnation: int = 0
    serial: int = -1  # the highest published version
    versions: dict[int, int] = field(default_factory=dict)  # published serial -> its step
    steps: dict[int, Step] = field(default_factory=dict)
    tallies: dict[int, Tally] = field(default_factory=dict)
    attempts: OrderedDict[str, m.RolloutScored] = field(default_factory=OrderedDict)
    stops: Counter[str] = field(default_factory=Counter)
    scored: int = 0
    heard: Seen = field(default_factory=Seen)  # attempts that have a verdict
    lost: Seen = field(default_factory=Seen)  # lives of attempts (attempt, epoch) that infrastructure ended
    unlisted: Tally = field(default_factory=Tally)  # the last training attempts of those that are listed no more
    evals: dict[str, m.EvalFinished] = field(default_factory=dict)

    @property
    def starting(self) -> bool:
        """Whether it was commanded to start, and the scheduler has not answered yet."""
        return self.state is RunState.announced and any(one.action == "start" for one in self.done)

    @property
    def failed(self) -> int:
        return len(self.lost)

    @property
    def step(self) -> int:
        return max(self.steps, default=0)

    def trained(self, group: str) -> int | None:
        """The step of the surviving lineage that trained it; None: none has so far."""
        return next((number for number, step in self.steps.items() if step.trained(group)), None)

    def lately(self) -> Tally:
        """The last training attempts together."""
        tally = Tally()
        for scored in reversed(self.attempts.values()):
            if scored.key.purpose == Purpose.train:
                tally.add(scored)
                if tally.attempts >= EXAMPLES:
                    break
        return tally if tally.attempts else self.unlisted

    def unlist(self) -> None:
        """Forgets the attempts themselves."""
        self.unlisted = self.lately()
        self.attempts.clear()


class Board:
    def __init__(self, attempts_per_run: int) -> None:
        self._attempts_per_run = attempts_per_run
        self._statuses = Statuses()
        self._listed: OrderedDict[str, RunBoard] = OrderedDict()  # the one that practised last at the end
        self.runs: dict[str, RunBoard] = {}
        self.replicas: dict[str, m.PolicyApplied] = {}  # each one's last word, the newest at the end
        self.overtaken: dict[
            str, float
        ] = {}  # replica -> when another first served a newer version of its run than it does
        self.alerts: deque[m.Alert] = deque(maxlen=ALERTS)
        self.complete = True  # False while what was said before is still being read

    def newest(self, count: int | None = None) -> list[str]:
        """Names of runs, the newest first: they are sortable by start."""
        return sorted(self.runs, reverse=True)[:count]

    def apply(self, message: Any, at: float = 0.0) -> None:
        """Takes one message of any topic that the console reads. `at`: when it was sent, Unix seconds; 0: not said."""
        if isinstance(message, m.Alert):
            self.alerts.appendleft(message)
            return
        if isinstance(message, m.PolicyApplied):
            self._applied(message, at)
            return
        run = self.runs.get(message.run) or self.runs.setdefault(message.run, RunBoard(message.run))
        match message:
            case m.RunCommand():
                _note(run, commanded(message, at))
            case m.RunStatus():
                self._stand(run, message)
            case m.IncarnationStarted():
                if message.incarnation >= run.incarnation:
                    run.incarnation = message.incarnation
                    run.steps = {number: step for number, step in run.steps.items() if number <= message.step}
            case m.StepCommitted():
                if message.incarnation >= run.incarnation:
                    metrics = {sys.intern(name): value for name, value in message.metrics.items()}
                    groups = b"".join(map(_digest, message.groups))
                    run.steps[message.step] = Step(max(message.groups.values(), default=0), metrics, groups)
            case m.PolicyPublished():
                run.serial = max(run.serial, message.serial)
                run.versions[message.serial] = message.step
            case m.RolloutFailed():
                run.lost.add(f"{message.key.attempt} {message.key.epoch}")
            case m.RolloutScored():
                self._score(run, message)
            case m.EvalFinished():
                run.evals[message.eval] = message

    def _applied(self, message: m.PolicyApplied, at: float) -> None:
        self.replicas.pop(message.replica, None)
        self.overtaken.pop(message.replica, None)
        self.replicas[message.replica] = message
        if not (at and message.ok and message.pool == "rollout"):  # one of the evaluation pool may be pinned
            return
        for name, other in self.replicas.items():
            if (other.pool, other.run) == ("rollout", message.run) and other.serial < message.serial:
                self.overtaken.setdefault(name, at)

    def _stand(self, run: RunBoard, status: m.RunStatus) -> None:
        before = self._statuses.of(status.run)
        if not self._statuses.hear(status):
            return
        if (done := decided(before, status)) is not None:
            _note(run, done)
        run.state, run.reason, run.answered = status.state, status.reason, status.answers or run.answered
        run.beside = status.beside

    def _score(self, run: RunBoard, scored: m.RolloutScored) -> None:
        if not run.heard.add(scored.key.attempt):  # the first verdict wins
            return
        run.attempts[scored.key.attempt] = scored
        self._listed[run.run] = run
        self._listed.move_to_end(run.run)
        while len(self._listed) > LISTED_RUNS:
            self._listed.popitem(last=False)[1].unlist()
        while len(run.attempts) > self._attempts_per_run:
            run.attempts.popitem(last=False)
        if scored.key.purpose != Purpose.train:
            return
        run.scored += 1
        run.stops[scored.stop.value] += 1
        run.tallies.setdefault(scored.oldest_version, Tally()).add(scored)


def _note(run: RunBoard, done: Done) -> None:
    """The two topics come in any order among each other, and again from their beginning."""
    if not done.at or done not in run.done:
        run.done = sorted([*run.done, done], key=lambda one: one.at)[-DONE:]
