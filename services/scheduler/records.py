"""What the scheduler keeps in memory of a run: its own row, groups, attempts, replicas, and what a batch changed. Plain data.

How they lie in the ledger's tables: `rows`. How they are read back: `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from shared.contracts.ids import parse_attempt
from shared.contracts.life import RunState
from shared.contracts.lineage import serials
from shared.contracts.messages import Effort, RolloutFailed, RolloutScored
from shared.contracts.run import Ref
from shared.contracts.topics import Topic
from shared.ledger.transitions import GROUP_MOVES, AttemptState, GroupState, Place, move

GROUPS_PER_PROBLEM = 3  # a problem whose groups were dropped or quarantined so often is left alone

ADMISSIONS = 9  # times of the last admissions that we keep: pauses between problems
CONFIGURED, ROLLBACK = (
    "run.configured",
    "run.rollback",
)  # events' kinds: a configuration was taken; people want to go back
COMPLETE = "problems.complete"  # an event's kind: the curator said that no more problems will come

ANY = ""  # instead of a rollout's checksum: graders of earlier releases do not name what they failed to grade

# Between two words to the trainer while no replica has loaded anything: where the new base cannot be read either, the store is
# at fault, and a base every few seconds would fill it.
FIRST_AGAIN_S, LAST_AGAIN_S = 30.0, 1800.0

T = TypeVar("T")


def of_row(kind: type[T], row: Any) -> T:
    """Make a dataclass of a ledger's row that has a column for each of its fields."""
    return kind(**{one.name: getattr(row, one.name) for one in fields(kind)})  # type: ignore[arg-type]


@dataclass(slots=True)
class Attempt:
    """`heard_at`, `lost_at`: seconds, in memory only. The lease of a claimed attempt begins again with every scheduler, so that
    one that was away takes no worker's silence for death. What takes longer than a lease is in the ledger."""

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
    steps: list[float] | msgspec.UnsetType = msgspec.UNSET  # as in GroupMember
    sampled: int | None = None  # the epoch that the trajectory is of; None: the epoch in force
    grading_s: float = 0.0  # as in RolloutFinished
    unusable: str = (
        ""  # why the trajectory can never be graded (in the ledger: the reason of a finished attempt); empty: it can
    )
    grade_at: float | None = None  # when it is to be graded again; None: nobody said that grading failed
    checkpoint: Ref | None = None  # that its next epoch continues from; None: it begins
    gradings: int = 0  # times that it was to be graded again
    overtaken_at: float | None = None  # since when a rollout that finished later has its verdict; None: none has
    asked_at: float = 0.0  # when its request or its grading was last repeated
    repeats: int = 0  # of its request
    # In memory only.
    ungraded: dict[str, RolloutFailed] = field(
        default_factory=dict
    )  # by the checksum of a rollout not read of yet, or ANY
    # Epoch and checksum of rollouts that cannot be graded: that one is finished may be said again while a later epoch runs.
    useless: set[tuple[int, str]] = field(default_factory=set)

    @property
    def rolled_out(self) -> int:
        """The epoch that its trajectory is of."""
        return self.epoch if self.sampled is None else self.sampled

    def remember(self, before: Attempt) -> None:
        """Take over what only memory holds, from the same attempt before the run was loaded again."""
        if before.epoch == self.epoch:
            self.heard_at, self.lost_at = before.heard_at, before.lost_at
            self.ungraded, self.useless = before.ungraded, before.useless

    def told(self, epoch: int, state: AttemptState) -> bool:
        """Moves the attempt if what it was told is ahead of where it is. False: nothing new (see transitions)."""
        place = Place(self.epoch, self.state)
        moved = move(place, Place(epoch, state))
        self.epoch, self.state = moved
        return moved != place

    @property
    def fruitless(self) -> int:
        """Return how many epochs before this one ended without a new checkpoint, since the last that wrote one."""
        there = parse_attempt(self.checkpoint.key) if self.checkpoint is not None else None
        return self.epoch if there is None else self.epoch - there.epoch

    def kept(self, checkpoint: Ref, oldest_version: int) -> bool:
        """Take a checkpoint of this epoch or an earlier one. True: it is newer than what was known. A name grows with its epoch
        and number."""
        known, there = self.checkpoint, parse_attempt(checkpoint.key)
        before = parse_attempt(known.key) if known is not None else None
        if there is None or there.attempt != self.id or there.epoch > self.epoch:
            return False
        if before is not None and (there.epoch, there.name) <= (before.epoch, before.name):
            return False
        self.checkpoint = checkpoint
        self.saw(oldest_version)
        return True

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
    damaged: bool = False  # not ok, and why: what was published as `serial` is damaged or lost
    serving: int = -1  # not ok: the version that it can still answer with; -1: none


@dataclass(slots=True)
class Mending:
    """What the trainer was told since a replica loaded a version last. In memory only. `told`: the version; -1: none."""

    told: int = -1
    again_at: float = 0.0
    times: int = 0

    def tell(self, serial: int, now: float) -> bool:
        """Return whether the trainer is to be told now; then the next version has to wait for a while."""
        if serial == self.told or now < self.again_at:
            return False
        self.again_at = now + min(LAST_AGAIN_S, FIRST_AGAIN_S * 2**self.times)
        self.told, self.times = serial, self.times + 1
        return True


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


def returns(state: GroupState, announced: int | None, count: int) -> bool:
    """Whether the problem of this group, if it is its last, may be asked for again. `count`: groups of the problem so far. Their
    numbers may be greater: a ledger that is behind leaves some out."""
    if count >= GROUPS_PER_PROBLEM:
        return False
    return state is GroupState.quarantined or (state is GroupState.dropped and announced is None)
