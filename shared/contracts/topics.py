"""Every topic: its name, key, partitions and whether it is compacted; and who uses it, how. The single place where they are
declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from shared.contracts import messages as m

Message = msgspec.Struct
LETTERS = ".dlq"  # how the name of a topic of dead letters ends
YEAR_H = 24 * 365


@dataclass(frozen=True, slots=True)
class Topic:
    """`types`: the message types it may carry (a tagged union). `partitions`: 1 where order per run matters. `compacted`: of each
    key only the last message is needed; it too goes when its retention is over. `compact_after_h`: earlier ones are kept for so
    many hours at least."""

    name: str
    types: tuple[type[msgspec.Struct], ...]
    partitions: int = 64
    compacted: bool = False
    retention_h: int = 168
    compact_after_h: int = 0

    @property
    def dead_letter(self) -> str:
        return self.name + LETTERS

    @property
    def holds_letters(self) -> bool:
        """Dead letters: they stay for their whole retention, whoever has acknowledged them."""
        return self.name.endswith(LETTERS)


PROBLEMS_ADMITTED = Topic("problems.admitted", (m.ProblemAdmitted,), partitions=8)
ROLLOUTS_REQUESTED = Topic("rollouts.requested", (m.RolloutRequested,))
ATTEMPTS_PROGRESS = Topic("attempts.progress", (m.AttemptClaimed, m.AttemptHeartbeat, m.AttemptCheckpointed))
# By attempt, and of most there is one word at most: to compact would remove nothing. Time does.
ATTEMPTS_CANCEL = Topic("attempts.cancel", (m.AttemptCancel,), partitions=1)
ROLLOUTS_FINISHED = Topic("rollouts.finished", (m.RolloutFinished, m.RolloutFailed))
ROLLOUTS_SCORED = Topic("rollouts.scored", (m.RolloutScored, m.RolloutFailed))
GROUPS_READY = Topic("groups.ready", (m.GroupReady,), partitions=1)
GROUPS_QUARANTINED = Topic("groups.quarantined", (m.GroupQuarantined,), partitions=1)
STEPS_COMMITTED = Topic("steps.committed", (m.StepCommitted, m.IncarnationStarted), partitions=1)
# Who joins late reads these from the first message: they outlive any run. By run, their key, none of the first and the
# last may be compacted: a version may be needed as the base of the next ones' deltas, and a rollback goes back to an earlier
# one. Of a replica only the last word counts, and nobody asks for more; those that are gone
# for good (their names are new with every start on some clusters) are forgotten after a month.
POLICIES_PUBLISHED = Topic("policies.published", (m.PolicyPublished,), partitions=1, retention_h=YEAR_H)
POLICIES_APPLIED = Topic("policies.applied", (m.PolicyApplied,), partitions=1, compacted=True, retention_h=24 * 30)
POLICIES_PROMOTED = Topic("policies.promoted", (m.PolicyPromoted,), partitions=1, retention_h=YEAR_H)
EVALS_REQUESTED = Topic("evals.requested", (m.EvalRequested,), partitions=1, retention_h=YEAR_H)
EVALS_FINISHED = Topic("evals.finished", (m.EvalFinished,), partitions=1, retention_h=YEAR_H)
RUNS_COMMANDS = Topic("runs.commands", (m.RunCommand,), partitions=1, retention_h=YEAR_H)
# Each status says everything of its run. The earlier ones are kept for a while all the same: they tell its history.
RUNS_STATE = Topic("runs.state", (m.RunStatus,), partitions=1, compacted=True, compact_after_h=168, retention_h=YEAR_H)
ALERTS = Topic("alerts", (m.Alert,), partitions=1)

TOPICS: dict[str, Topic] = {t.name: t for t in list(globals().values()) if isinstance(t, Topic)}


@dataclass(frozen=True, slots=True)
class Access:
    """What one of us does with the topics. On a cluster with rules it may do that and no more (`etude topics acl`).

    `writes`: publishes. `hears`: reads from the beginning, in no group. `takes`: by group, what it reads as one of that group;
    what it cannot read it buries, and it writes an alert where records of it are gone.
    A group that ends with a dot stands for all whose names begin so. `counts`: by group, of
    which topics it asks how much that group has not acknowledged.
    """

    writes: tuple[Topic, ...] = ()
    hears: tuple[Topic, ...] = ()
    takes: Mapping[str, tuple[Topic, ...]] = field(default_factory=dict)
    counts: Mapping[str, tuple[Topic, ...]] = field(default_factory=dict)

    @property
    def taken(self) -> tuple[Topic, ...]:
        return tuple(dict.fromkeys(topic for topics in self.takes.values() for topic in topics))


SERVICES = {
    "curator": Access(writes=(PROBLEMS_ADMITTED, ALERTS), takes={"curator": (RUNS_STATE,)}),
    "scheduler": Access(
        # rollouts.finished: what could not be graded is said once more, to be graded again.
        writes=(ROLLOUTS_REQUESTED, ROLLOUTS_FINISHED, ATTEMPTS_CANCEL, GROUPS_READY, RUNS_STATE, ALERTS),
        counts={"rollout": (ROLLOUTS_REQUESTED,)},
        takes={
            "scheduler": (
                PROBLEMS_ADMITTED,
                ATTEMPTS_PROGRESS,
                ROLLOUTS_FINISHED,
                ROLLOUTS_SCORED,
                GROUPS_QUARANTINED,
                STEPS_COMMITTED,
                POLICIES_PUBLISHED,
                POLICIES_APPLIED,
                POLICIES_PROMOTED,
                RUNS_COMMANDS,
                RUNS_STATE,  # its own: whether a status comes after a newer one
                ALERTS,
            )
        },
    ),
    "rollout": Access(
        writes=(ATTEMPTS_PROGRESS, ROLLOUTS_FINISHED, ALERTS),
        hears=(POLICIES_APPLIED, RUNS_STATE, ATTEMPTS_CANCEL),
        takes={"rollout": (ROLLOUTS_REQUESTED,)},
    ),
    "inference": Access(
        writes=(POLICIES_APPLIED,),
        hears=(RUNS_STATE, POLICIES_PUBLISHED, POLICIES_PROMOTED, EVALS_REQUESTED, EVALS_FINISHED),
    ),
    "reward": Access(
        writes=(ROLLOUTS_SCORED, ALERTS),
        hears=(RUNS_STATE, ROLLOUTS_SCORED, ALERTS),
        takes={"reward": (ROLLOUTS_FINISHED,)},
    ),
    "grader": Access(),  # it hears by Celery and answers by the object store
    "trainer": Access(
        # groups.ready: one that is superseded gives back what was meant for its heir.
        writes=(POLICIES_PUBLISHED, STEPS_COMMITTED, GROUPS_QUARANTINED, GROUPS_READY, ALERTS),
        hears=(RUNS_STATE,),
        takes={"trainer": (GROUPS_READY,), "trainer.": (GROUPS_READY,)},  # the latter: of one run alone
    ),
    "evaluator": Access(
        writes=(ROLLOUTS_REQUESTED, EVALS_FINISHED, ALERTS),
        takes={"evaluator": (EVALS_REQUESTED, ROLLOUTS_SCORED, ROLLOUTS_FINISHED, ATTEMPTS_PROGRESS)},
    ),
}
# By group, what its members take: who asks how far they are behind asks for all of them.
_TAKEN = {group: topics for one in SERVICES.values() for group, topics in one.takes.items()}
SERVICES["console"] = Access(
    writes=(RUNS_COMMANDS,),
    hears=(
        RUNS_COMMANDS,
        RUNS_STATE,
        STEPS_COMMITTED,
        ROLLOUTS_FINISHED,
        ROLLOUTS_SCORED,
        POLICIES_PUBLISHED,
        POLICIES_APPLIED,
        EVALS_FINISHED,
        ALERTS,
    ),
    counts={group: topics for group, topics in _TAKEN.items() if not group.endswith(".")},
)
# As shared.bus.dead_letters declares them, but for what they carry.
_LETTERS = tuple(Topic(topic.dead_letter, (), partitions=1, retention_h=YEAR_H) for topic in TOPICS.values())
PEOPLE = {
    "cli": Access(  # `etude start`, `stop`, …, `demo`, `eval`
        writes=(RUNS_COMMANDS, POLICIES_PROMOTED, EVALS_REQUESTED),
        hears=(
            RUNS_COMMANDS,
            RUNS_STATE,
            ROLLOUTS_REQUESTED,
            ROLLOUTS_FINISHED,
            ROLLOUTS_SCORED,
            GROUPS_READY,
            STEPS_COMMITTED,
            POLICIES_PUBLISHED,
            POLICIES_APPLIED,
            POLICIES_PROMOTED,
            EVALS_FINISHED,
            ALERTS,
        ),
        counts={"scheduler": (RUNS_COMMANDS,)},
    ),
    "dlq": Access(  # `etude dlq`: what is put back goes to any topic but that of the scheduler alone
        writes=tuple(topic for topic in TOPICS.values() if topic is not RUNS_STATE),
        hears=_LETTERS,
        takes={"dlq.replayed": _LETTERS},
        counts={"dlq.nobody": _LETTERS},
    ),
    "scaler": Access(counts=_TAKEN),  # KEDA
}
ACCESS: dict[str, Access] = {**SERVICES, **PEOPLE}
