"""What is said of a run, as points of curves: name, step, value, wall time. Pure: no input or output.

Which steps count: those of the surviving lineage. An incarnation of the trainer goes on from a step of an earlier one (after a
crash, or because somebody rolled back); what earlier ones committed beyond that step is dead, whenever that is heard, and
so is every evaluation of a version that they published there. The step that is trained in its place counts instead.
An evaluation stands at the step of the version that it is of, a change of state at the last step that was committed before.
What is said twice counts when it was said first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from shared.contracts import messages as m
from shared.contracts.life import RunState
from shared.contracts.statuses import Statuses

# Stable: whoever has stored a curve of `run/state` reads it by these.
STATE_NUMBERS = {
    RunState.announced: 0,
    RunState.running: 1,
    RunState.paused: 2,
    RunState.stopping: 3,
    RunState.finished: 4,
}
_OF_ONE_VERSION = re.compile(r"_version_\d+$")  # a name per version: too many for curves


class Kind(StrEnum):
    train = "train"
    eval = "eval"
    run = "run"


# Every row has this figure. With its step or time it says which row it is, so that a target can be asked what it holds.
MARKERS = {Kind.train: "train/incarnation", Kind.eval: "eval/version", Kind.run: "run/state"}
_KINDS = {name: kind for kind, name in MARKERS.items()}


class Heard(NamedTuple):
    """A message, and when it was said: Unix seconds by the sender's clock, 0 where it did not say."""

    message: Any
    at: float


class Point(NamedTuple):
    name: str
    step: int
    value: float
    at: float


class Mark(NamedTuple):
    """Which row it is. `number`: the value of its marker. `place`: of training the step, else when it was said (Unix ms)."""

    kind: Kind
    number: int
    place: int


@dataclass(frozen=True, slots=True)
class Row:
    """What one message says, all of one step. `figures`: whole name -> value, the marker last."""

    kind: Kind
    step: int
    at: float
    figures: Mapping[str, float]

    @property
    def mark(self) -> Mark:
        return _mark(self.kind, self.figures[MARKERS[self.kind]], self.step, self.at)

    @property
    def points(self) -> list[Point]:
        return [Point(name, self.step, value, self.at) for name, value in self.figures.items()]


def mark(point: Point) -> Mark | None:
    """The mark of the point's row; None: it is no marker."""
    kind = _KINDS.get(point.name)
    return None if kind is None else _mark(kind, point.value, point.step, point.at)


def _mark(kind: Kind, value: float, step: int, at: float) -> Mark:
    return Mark(kind, int(value), step if kind is Kind.train else round(1000 * at))


@dataclass(frozen=True, slots=True)
class Past:
    """A run as it was told so far. `rows`: the surviving ones, by step. `forks`: incarnation -> the step that it went on from.
    `versions`: published serial -> (incarnation, step)."""

    rows: Sequence[Row]
    state: RunState
    forks: Mapping[int, int]
    versions: Mapping[int, tuple[int, int]]

    def last_good(self, held: Iterable[Mark]) -> int | None:
        """The last step of a curve with these rows that can stay; None: all of it can."""
        dead = []
        for one in held:
            place = (one.number, one.place) if one.kind is Kind.train else self.versions.get(one.number)
            if one.kind is not Kind.run and place is not None and not _survives(self.forks, *place):
                dead.append(place[1])
        return min(dead) - 1 if dead else None


def past(run: str, heard: Sequence[Heard]) -> Past:
    """What the messages say of `run`, whatever else is among them. In the order of their topics; the topics come in any order
    among each other."""
    of_run = [one for one in heard if one.message.run == run]
    forks = _forks(of_run)
    commits: dict[tuple[int, int], Heard] = {}
    evaluations: dict[str, Heard] = {}
    versions: dict[int, tuple[int, int]] = {}
    for one in of_run:
        match one.message:
            case m.StepCommitted(incarnation=incarnation, step=step, serial=serial):
                versions.setdefault(serial, (incarnation, step))
                if _survives(forks, incarnation, step):
                    commits.setdefault((incarnation, step), one)
            case m.PolicyPublished(incarnation=incarnation, step=step, serial=serial):
                versions[serial] = (incarnation, step)
            case m.EvalFinished(eval=name):
                evaluations.setdefault(name, one)
    rows = [_trained(*one) for one in commits.values()]
    for message, at in evaluations.values():
        if (place := versions.get(message.serial)) is not None and _survives(forks, *place):
            rows.append(_evaluated(message, place[1], at))
    changes = list(_changes(of_run))
    trained = [(commit.at, step) for (_, step), commit in commits.items()]
    for state, at in changes:
        step = max((number for said, number in trained if said < at), default=0)
        rows.append(Row(Kind.run, step, at, {MARKERS[Kind.run]: float(STATE_NUMBERS[state])}))
    rows.sort(key=lambda row: (row.step, row.at))
    return Past(rows, changes[-1][0] if changes else RunState.announced, forks, versions)


def _forks(of_run: Iterable[Heard]) -> dict[int, int]:
    """By what is published too: an incarnation publishes the version that it goes on from first, and that is kept for a year,
    its start for a week alone."""
    forks: dict[int, int] = {}
    for message, _ in of_run:
        if isinstance(message, m.IncarnationStarted | m.PolicyPublished):
            known = forks.get(message.incarnation, message.step)
            forks[message.incarnation] = min(known, message.step)
    return forks


def _survives(forks: Mapping[int, int], incarnation: int, step: int) -> bool:
    return all(step <= began for later, began in forks.items() if later > incarnation)


def _changes(of_run: Iterable[Heard]) -> Iterator[tuple[RunState, float]]:
    """(state, since) of every state that the run was in."""
    statuses, state = Statuses(), RunState.announced
    for message, _ in of_run:
        if isinstance(message, m.RunStatus) and statuses.hear(message) and message.state is not state:
            state = message.state
            yield state, message.since


def _trained(message: m.StepCommitted, at: float) -> Row:
    figures = {f"train/{name}": value for name, value in message.metrics.items() if not _OF_ONE_VERSION.search(name)}
    figures["train/groups"] = float(len(message.groups))
    figures["train/version"] = float(message.serial)
    figures[MARKERS[Kind.train]] = float(message.incarnation)
    return Row(Kind.train, message.step, at, figures)


def _evaluated(message: m.EvalFinished, step: int, at: float) -> Row:
    figures = {f"eval/{name}": value for name, value in message.figures.items()}
    figures[MARKERS[Kind.eval]] = float(message.serial)
    return Row(Kind.eval, step, at, figures)
