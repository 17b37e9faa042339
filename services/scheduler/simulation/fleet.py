"""A fleet without machines: attempts take slots, a trainer takes groups, weights arrive while attempts run. Deterministic.

Invariants
- Time is a number. Nothing happens between two events but waiting.
- A rule decides which groups are asked for and which complete groups make a step; the fleet decides nothing.
- Every rule sees the same attempts: the n-th group that is opened lasts as long under each of them.
- An attempt stands on the version that it began with: later weights reach it in mid-flight, and its oldest token stays as old.
- Step t trains from the weights of step t - 1, so a group whose oldest token is of version o has age t - 1 - o then.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np

from services.scheduler.simulation.durations import Durations

BLOCK = 1024  # groups whose durations are drawn together
What = Literal["asked", "begun", "ended"]  # of an attempt


@dataclass(frozen=True, slots=True)
class Fleet:
    """`slots`: attempts at a time, of all workers together. Seconds: `step_s` from the first computation of a step to its last,
    `swap_s` from then until every engine serves the new weights, `grading_s` from the end of an attempt to its verdict."""

    slots: int
    groups_per_step: int = 16
    group_size: int = 8
    max_staleness: int = 4
    step_s: float = 60.0
    swap_s: float = 2.0
    grading_s: float = 1.0

    def __post_init__(self) -> None:
        """Raises ValueError that names the field."""
        for name in ("slots", "groups_per_step", "group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: found {getattr(self, name)}; allowed: at least 1")
        for name in ("max_staleness", "swap_s", "grading_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: found {getattr(self, name)}; allowed: at least 0")
        if not self.step_s > 0:
            raise ValueError(f"step_s: found {self.step_s:g}; allowed: above 0")


@dataclass(slots=True, eq=False)
class Attempt:
    group: Group
    place: int
    lasts_s: float
    version: int | None = None  # that it began with
    done: bool = False


@dataclass(slots=True, eq=False)
class Group:
    number: int  # in the order of opening
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return all(attempt.done for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        """What its attempts sampled, in seconds of a slot."""
        return sum(attempt.lasts_s for attempt in self.attempts)

    def oldest(self, version: int) -> int:
        """The version of its oldest token: its first attempt begins first. Before that: no less than `version`."""
        first = self.attempts[0].version
        return version if first is None else first


@dataclass(slots=True)
class View:
    """What a rule may know. `version`: that engines serve. `step`: that the trainer made last. `busy`: slots in use.
    `running`: groups that are not complete, `waiting`: those that are and were not trained, each in the order in which they
    became so. `waits`: attempts that were asked for and have no slot."""

    fleet: Fleet
    now: float = 0.0
    version: int = 0
    step: int = 0
    busy: int = 0
    waits: int = 0
    training: bool = False
    running: dict[int, Group] = field(default_factory=dict)
    waiting: dict[int, Group] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        """Groups that the trainer has taken, those of the step in hand included."""
        return (self.step + self.training) * self.fleet.groups_per_step


class Rule(Protocol):
    """When groups are opened, and which of them a step is made of."""

    name: str

    def opens(self, view: View) -> int:
        """How many groups to ask for now."""
        ...

    def batch(self, view: View) -> tuple[list[Group], list[Group]]:
        """Of the waiting groups: those of the next step (none: it cannot begin), and those to throw away."""
        ...

    def heard(self, view: View, attempt: Attempt, what: What) -> None:
        """An attempt was asked for, has got a slot, or has got its verdict."""
        ...

    def stepped(self, view: View, groups: list[Group]) -> None:
        """The trainer has made a step of these groups."""
        ...

    def swapped(self, view: View) -> None:
        """The engines serve `view.version` now."""
        ...


@dataclass(frozen=True, slots=True)
class Trained:
    """A step, as it was made. Times in seconds."""

    step: int
    began_at: float
    ended_at: float
    ages: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(slots=True)
class History:
    """What happened. `opened`: seconds of a slot by number of the group; `discarded`: numbers of groups."""

    steps: list[Trained] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    opened_at: list[float] = field(default_factory=list)
    discarded: list[tuple[float, int]] = field(default_factory=list)
    busy: list[tuple[float, int]] = field(default_factory=list)  # (time, slots in use from then on)
    spans: list[tuple[float, float]] = field(
        default_factory=list
    )  # of attempts: times of the first token and of the verdict
    stuck: str = ""  # why it ended before its last step


def simulate(
    rule: Rule,
    fleet: Fleet,
    durations: Durations,
    *,
    steps: int,
    seed: int = 0,
    resolution_s: float = 0.0,
    after_step: Callable[[], object] = lambda: None,
) -> History:
    """Run until the trainer has made so many steps. `resolution_s`: events that lie no further apart are handled together, at the
    time of the last. `after_step` is called after each step: for progress bars."""
    world = _World(rule, fleet, durations, seed, resolution_s)
    world.run(steps, after_step)
    return world.history


class _World:
    def __init__(self, rule: Rule, fleet: Fleet, durations: Durations, seed: int, resolution_s: float) -> None:
        self.rule, self.fleet, self.durations, self.resolution_s = rule, fleet, durations, resolution_s
        self.random = np.random.default_rng(seed)
        self.view, self.history = View(fleet), History()
        self.drawn: deque[list[float]] = deque()
        self.queue: deque[Attempt] = deque()  # asked for, without a slot
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.ties = 0

    def later(self, after_s: float, happens: Callable[[], None]) -> None:
        self.ties += 1
        heapq.heappush(self.events, (self.view.now + after_s, self.ties, happens))

    def run(self, steps: int, after_step: Callable[[], object]) -> None:
        self.settle()
        while len(self.history.steps) < steps:
            if not self.events:
                nothing = f"nothing runs after {self.view.now:.0f} s, and {self.rule.name} opens no group"
                self.history.stuck = nothing
                return
            made = len(self.history.steps)
            upto = self.events[0][0] + self.resolution_s
            while self.events and self.events[0][0] <= upto:
                self.view.now, _, happens = heapq.heappop(self.events)
                happens()
            self.settle()
            for _ in range(len(self.history.steps) - made):
                after_step()

    # Events

    def ended(self, attempt: Attempt) -> None:
        self.view.busy -= 1
        self.later(self.fleet.grading_s, partial(self.scored, attempt))

    def scored(self, attempt: Attempt) -> None:
        attempt.done = True
        group = attempt.group
        if group.complete:
            del self.view.running[group.number]
            self.view.waiting[group.number] = group
        self.rule.heard(self.view, attempt, "ended")

    def stepped(self, began: float, groups: list[Group], ages: tuple[int, ...]) -> None:
        self.view.training = False
        self.view.step += 1
        numbers = tuple(group.number for group in groups)
        self.history.steps.append(Trained(self.view.step, began, self.view.now, ages, numbers))
        self.rule.stepped(self.view, groups)
        self.later(self.fleet.swap_s, partial(self.swapped, self.view.step))

    def swapped(self, version: int) -> None:
        self.view.version = version
        self.rule.swapped(self.view)

    # What follows from them

    def settle(self) -> None:
        self.train()
        for _ in range(self.rule.opens(self.view)):
            self.open()
        while self.queue and self.view.busy < self.fleet.slots:
            attempt = self.queue.popleft()
            self.view.waits -= 1
            attempt.version = self.view.version
            self.view.busy += 1
            self.rule.heard(self.view, attempt, "begun")
            self.later(attempt.lasts_s, partial(self.ended, attempt))
            self.history.spans.append((self.view.now, self.view.now + attempt.lasts_s + self.fleet.grading_s))
        if not self.history.busy or self.history.busy[-1][1] != self.view.busy:
            self.history.busy.append((self.view.now, self.view.busy))

    def open(self) -> None:
        if not self.drawn:
            self.drawn.extend(self.durations.groups(BLOCK, self.fleet.group_size, self.random).tolist())
        group = Group(len(self.history.opened))
        group.attempts = [Attempt(group, place, lasts) for place, lasts in enumerate(self.drawn.popleft())]
        self.history.opened.append(group.seconds)
        self.history.opened_at.append(self.view.now)
        self.view.running[group.number] = group
        self.queue.extend(group.attempts)
        self.view.waits += len(group.attempts)
        for attempt in group.attempts:
            self.rule.heard(self.view, attempt, "asked")

    def train(self) -> None:
        if self.view.training:
            return
        groups, thrown = self.rule.batch(self.view)
        for group in thrown:
            del self.view.waiting[group.number]
            self.history.discarded.append((self.view.now, group.number))
        if not groups:
            return
        for group in groups:
            del self.view.waiting[group.number]
        ages = tuple(self.view.step - group.oldest(self.view.step) for group in groups)
        self.view.training = True
        self.later(self.fleet.step_s, partial(self.stepped, self.view.now, groups, ages))
