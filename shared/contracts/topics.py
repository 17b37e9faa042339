"""Every topic: its name, key, partitions and whether it is compacted. The single place where they are declared."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.contracts import messages as m

Message = msgspec.Struct


@dataclass(frozen=True, slots=True)
class Topic:
    """`types`: the message types it may carry (a tagged union). `partitions`: 1 where order per run matters."""

    name: str
    types: tuple[type[msgspec.Struct], ...]
    partitions: int = 64
    compacted: bool = False
    retention_h: int = 168

    @property
    def dead_letter(self) -> str:
        return f"{self.name}.dlq"


PROBLEMS_ADMITTED = Topic("problems.admitted", (m.ProblemAdmitted,), partitions=8)
ROLLOUTS_REQUESTED = Topic("rollouts.requested", (m.RolloutRequested,))
ATTEMPTS_PROGRESS = Topic("attempts.progress", (m.AttemptClaimed, m.AttemptHeartbeat))
ATTEMPTS_CANCEL = Topic("attempts.cancel", (m.AttemptCancel,), partitions=1)
ROLLOUTS_FINISHED = Topic("rollouts.finished", (m.RolloutFinished, m.RolloutFailed))
ROLLOUTS_SCORED = Topic("rollouts.scored", (m.RolloutScored, m.RolloutFailed))
GROUPS_READY = Topic("groups.ready", (m.GroupReady,), partitions=1)
GROUPS_QUARANTINED = Topic("groups.quarantined", (m.GroupQuarantined,), partitions=1)
STEPS_COMMITTED = Topic("steps.committed", (m.StepCommitted, m.IncarnationStarted), partitions=1)
# Who joins late reads these from the first message: they outlive any run. Not compacted: a pause must not erase the start.
POLICIES_PUBLISHED = Topic("policies.published", (m.PolicyPublished,), partitions=1, retention_h=24 * 365)
POLICIES_APPLIED = Topic("policies.applied", (m.PolicyApplied,), partitions=1)
EVALS_REQUESTED = Topic("evals.requested", (m.EvalRequested,), partitions=1)
EVALS_FINISHED = Topic("evals.finished", (m.EvalFinished,), partitions=1)
RUNS_CONTROL = Topic("runs.control", (m.RunControl,), partitions=1, retention_h=24 * 365)
ALERTS = Topic("alerts", (m.Alert,), partitions=1)

TOPICS: dict[str, Topic] = {t.name: t for t in list(globals().values()) if isinstance(t, Topic)}
