"""Which moves an attempt, a group and a run may make. Pure.

An attempt's place is (epoch, state). Places are totally ordered, and what is told about an attempt moves it to the
greater of where it is and what it was told: that makes every transition idempotent and all of them commute, so that
duplicates and messages out of order end in the same place. From the order follow three promises:

- a later state implies the earlier ones (`scored` without ever hearing of `claimed` is `scored`);
- epochs fence: what belongs to an older epoch is below everything of a newer one;
- ends are final: nothing leaves `grouped`, `failed` or `dropped`, whatever its epoch.

    requested → claimed → finished → scored → grouped        lost → requested (epoch + 1) or failed
         └─────────┴─────────┴──→ lost                       any but an end → dropped

`lost` says that infrastructure lost this epoch and the reconciler has not decided yet; a verdict of the same epoch that
arrives before it decides still counts (no finished rollout is lost), because `scored` is above `lost`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class AttemptState(StrEnum):
    requested = "requested"
    claimed = "claimed"
    finished = "finished"
    lost = "lost"
    scored = "scored"
    failed = "failed"  # end: infrastructure, and no replacement left
    dropped = "dropped"  # end: its run or group went away; the reason is recorded
    grouped = "grouped"  # end: a member of a ready group


class GroupState(StrEnum):
    open = "open"
    ready = "ready"  # complete; whether it is trained is a fact of its own
    dropped = "dropped"
    quarantined = "quarantined"  # the trainer could not train it


class RunState(StrEnum):
    announced = "announced"  # heard of, no configuration yet
    running = "running"
    paused = "paused"
    stopping = "stopping"  # nothing more is requested; the trainer finishes what it has in hand
    finished = "finished"


class Place(NamedTuple):
    epoch: int
    state: AttemptState


RANK = {state: rank for rank, state in enumerate(AttemptState)}
ENDS = frozenset({AttemptState.failed, AttemptState.dropped, AttemptState.grouped})
LIVE = frozenset(AttemptState) - ENDS

GROUP_MOVES: dict[GroupState, frozenset[GroupState]] = {
    GroupState.open: frozenset({GroupState.ready, GroupState.dropped}),
    GroupState.ready: frozenset({GroupState.quarantined, GroupState.dropped}),
    GroupState.dropped: frozenset(),
    GroupState.quarantined: frozenset(),
}

RUN_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.announced: frozenset({RunState.running, RunState.stopping, RunState.finished}),
    RunState.running: frozenset({RunState.paused, RunState.stopping}),
    RunState.paused: frozenset({RunState.running, RunState.stopping}),
    RunState.stopping: frozenset({RunState.finished, RunState.running}),
    RunState.finished: frozenset({RunState.running}),  # resumed, perhaps with a larger budget
}

FIRST = Place(0, AttemptState.requested)


def order(place: Place) -> tuple[bool, int, int]:
    """The total order of places: ends above all, then epochs, then states."""
    return (place.state in ENDS, place.epoch, RANK[place.state])


def move(at: Place, told: Place) -> Place:
    """Where an attempt is after it was told to be in `told`: the greater of the two (a join: commutes, idempotent)."""
    return told if order(told) > order(at) else at


def may_become(at: Place, after: Place) -> bool:
    """Whether the ledger's row may go from one place to the other; several moves at once count as one. An end stays what it
    is: `move` orders the ends among themselves only so that it commutes. The database holds it too (migration 0003)."""
    return at == after or (at.state not in ENDS and after.epoch >= at.epoch and move(at, after) == after)


def settle(told: Iterable[Place], start: Place = FIRST) -> Place:
    """Where all of `told` leads to, in whatever order and however often they are said."""
    place = start
    for one in told:
        place = move(place, one)
    return place
