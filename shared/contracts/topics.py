"""Every topic: its name, key, partitions and whether it is compacted. The single place where they are declared."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.contracts import messages as m

Message = msgspec.Struct
LETTERS = ".dlq"  # how the name of a topic of dead letters ends
YEAR_H = 24 * 365


@dataclass(frozen=True, slots=True)
class Topic:
    """`types`: the message types it may carry (a tagged union). `partitions`: 1 where order per run matters. `compacted`: of each
    key only the last message is needed; it too goes when its retention is over."""

    name: str
    types: tuple[type[msgspec.Struct], ...]
    partitions: int = 64
    compacted: bool = False
    retention_h: int = 168

    @property
    def dead_letter(self) -> str:
        return self.name + LETTERS

    @property
    def holds_letters(self) -> bool:
        """Dead letters: they stay for their whole retention, whoever has acknowledged them."""
        return self.name.endswith(LETTERS)


PROBLEMS_ADMITTED = Topic("problems.admitted", (m.ProblemAdmitted,), partitions=8)
ROLLOUTS_REQUESTED = Topic("rollouts.requested", (m.RolloutRequested,))
ATTEMPTS_PROGRESS = Topic("attempts.progress", (m.AttemptClaimed, m.AttemptHeartbeat))
# By attempt, and of most there is one word at most: to compact would remove nothing. Time does.
ATTEMPTS_CANCEL = Topic("attempts.cancel", (m.AttemptCancel,), partitions=1)
ROLLOUTS_FINISHED = Topic("rollouts.finished", (m.RolloutFinished, m.RolloutFailed))
ROLLOUTS_SCORED = Topic("rollouts.scored", (m.RolloutScored, m.RolloutFailed))
GROUPS_READY = Topic("groups.ready", (m.GroupReady,), partitions=1)
GROUPS_QUARANTINED = Topic("groups.quarantined", (m.GroupQuarantined,), partitions=1)
STEPS_COMMITTED = Topic("steps.committed", (m.StepCommitted, m.IncarnationStarted), partitions=1)
# Who joins late reads these three from the first message: they outlive any run. By run, their key, none of the first and the
# last may be compacted: a version may be needed as the base of the next ones' deltas, a rollback goes back to an earlier one,
# and a pause must not erase the start. Of a replica only the last word counts, and nobody asks for more; those that are gone
# for good (their names are new with every start on some clusters) are forgotten after a month.
POLICIES_PUBLISHED = Topic("policies.published", (m.PolicyPublished,), partitions=1, retention_h=YEAR_H)
POLICIES_APPLIED = Topic("policies.applied", (m.PolicyApplied,), partitions=1, compacted=True, retention_h=24 * 30)
EVALS_REQUESTED = Topic("evals.requested", (m.EvalRequested,), partitions=1)
EVALS_FINISHED = Topic("evals.finished", (m.EvalFinished,), partitions=1)
RUNS_CONTROL = Topic("runs.control", (m.RunControl,), partitions=1, retention_h=YEAR_H)
ALERTS = Topic("alerts", (m.Alert,), partitions=1)

TOPICS: dict[str, Topic] = {t.name: t for t in list(globals().values()) if isinstance(t, Topic)}
