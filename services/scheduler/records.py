"""What the scheduler keeps in memory of a run: its own row, groups, attempts, replicas, and what a batch changed. Plain data.

How they lie in the ledger's tables: `rows`. How they are read back: `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from shared.contracts.lineage import serials
from shared.contracts.messages import Effort, RolloutScored
from shared.contracts.run import Ref
from shared.contracts.topics import Topic
from shared.ledger.transitions import GROUP_MOVES, AttemptState, GroupState, Place, RunState, move

GROUPS_PER_PROBLEM = 3  # a problem whose groups were dropped or quarantined so often is left alone


@dataclass(slots=True)
class Attempt:
    """`heard_at`, `lost_at`: seconds, in memory only. Leases begin anew with every scheduler, so that a scheduler that
    was away takes nobody's silence for death."""

    id: str
    group: str
    place: int
    epoch: int
    state: AttemptState
    policy_floor: int
    requested_at: float
    heard_at: float
    oldest_version: int | None = None
    newest_version: int | None = None
    worker: str = ""
    claimed_at: float | None = None
    finished_at: float | None = None
    cancelled_at: float | None = None
    stop: str | None = None
    seconds: float | None = None
    trajectory: Ref | None = None
    effort: Effort | None = None
    reason: str = ""
    lost_at: float = 0.0
    reward: float | None = None
    solved: bool = False

    def told(self, epoch: int, state: AttemptState) -> bool:
        """Moves the attempt if what it was told is ahead of where it is. False: nothing new (see transitions)."""
        place = Place(self.epoch, self.state)
        moved = move(place, Place(epoch, state))
        self.epoch, self.state = moved
        return moved != place

    @property
    def standing(self) -> int:
        """The oldest serial that it can stand on: that of its tokens, or before the first the floor of its request."""
        return self.policy_floor if self.oldest_version is None else self.oldest_version

    @property
    def versions(self) -> range:
        """The serials that its tokens may have."""
        return serials(self.standing, self.newest_version)

    def saw(self, version: int) -> bool:
        """A version of one of its tokens. True: it is older than all before."""
        if version < 0 or (self.oldest_version is not None and self.oldest_version <= version):
            return False
        self.oldest_version = version
        return True


@dataclass(slots=True)
class Group:
    id: str
    problem: str
    number: int
    draw: int
    size: int
    reward_config: str
    requested_at: float
    state: GroupState = GroupState.open
    closed_at: float | None = None
    sequence: int | None = None
    announced: int | None = None
    members: int = 0
    solved: int = 0
    turns: float = 0.0
    thinking_tokens: float = 0.0
    versions: list[int] = field(default_factory=list)  # serials that its members' tokens may have
    step: int = 0
    reason: str = ""
    attempts: list[Attempt] = field(default_factory=list)  # while it is open; a ready one loads them to be announced

    def enter(self, state: GroupState) -> None:
        """Raises ValueError for a move that no group makes."""
        if state not in GROUP_MOVES[self.state]:
            allowed = ", ".join(sorted(GROUP_MOVES[self.state])) or "none: it is an end"
            raise ValueError(
                f"group {self.id!r} cannot go from {self.state.value} to {state.value}; allowed: {allowed}"
            )
        self.state = state


@dataclass(slots=True)
class Head:
    """The run's own row."""

    run_id: str
    state: RunState = RunState.announced
    config: Ref | None = None
    code_version: str = ""
    pack_hash: str | None = None
    incarnation: int = -1
    created_at: float = 0.0
    first_request_at: float | None = None
    clock_started_at: float | None = None
    spent_s: float = 0.0
    stopped_at: float | None = None
    finished_at: float | None = None
    reason: str = ""
    drain: bool = True  # of the pause that holds: the trainer trains what is complete
    last_event: int = 0
    last_message: int = 0
    last_draw: int = 0
    last_ready: int = 0


@dataclass(slots=True)
class ReplicaState:
    pool: str
    serial: int
    ok: bool
    url: str
    pause_s: float
    applied_at: float
    reason: str


@dataclass(slots=True)
class Message:
    """One row of the outbox."""

    sequence: int
    topic: Topic
    key: str
    message: msgspec.Struct


@dataclass(slots=True)
class Changes:
    """What one batch changed in one run. Rows are written whole, so only who changed is noted."""

    attempts: dict[str, Attempt] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    verdicts: list[RolloutScored] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    outbox: list[Message] = field(default_factory=list)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # table -> new rows, insert-only tables
    replicas: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.attempts or self.groups or self.events or self.outbox or self.rows or self.replicas)


def returns(state: GroupState, announced: int | None, number: int) -> bool:
    """Whether the problem of this group, if it is its last, may be asked for again."""
    if number + 1 >= GROUPS_PER_PROBLEM:
        return False
    return state is GroupState.quarantined or (state is GroupState.dropped and announced is None)
