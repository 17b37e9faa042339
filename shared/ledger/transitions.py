"""Which moves an attempt and a group may make (a run: `shared.contracts.life`). Pure.

An attempt's place is (epoch, state). Places are totally ordered, and what is told about an attempt moves it to the
greater of where it is and what it was told: that makes every transition idempotent and all of them commute, so that
duplicates and messages out of order end in the same place. From the order follow three promises:

- a later state implies the earlier ones (`scored` without ever hearing of `claimed` is `scored`);
- epochs fence: what belongs to an older epoch is below everything of a newer one;
- ends are final: nothing leaves `grouped`, `failed` or `dropped`, whatever its epoch.

    requested → claimed → finished → scored → grouped        lost → requested (epoch + 1) or failed
         └─────────┴──→ lost ──→ finished                    any but an end → dropped

`lost` says that infrastructure lost this epoch and the reconciler has not decided yet. A rollout of the same epoch that
turns out to be finished still counts, because `finished` and `scored` are above `lost`: silence never discards a finished
rollout. A finished rollout that nobody can grade is graded again, and sampled again (epoch + 1) only if it cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple


class AttemptState(StrEnum):
    requested = "requested"
    claimed = "claimed"
    lost = "lost"
    finished = "finished"
    scored = "scored"
    failed = "failed"  # end: infrastructure, and no replacement left
    dropped = "dropped"  # end: its run or group went away; the reason is recorded
    grouped = "grouped"  # end: a member of a ready group


class GroupState(StrEnum):
    open = "open"
    ready = "ready"  # complete; whether it is trained is a fact of its own
    dropped = "dropped"
    quarantined = "quarantined"  # the trainer could not train it


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
