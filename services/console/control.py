"""What was done to a run, and when. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.messages import BY_SCHEDULER, RunCommand, RunStatus
from shared.contracts.statuses import decided_by, is_decision

REASON_CHARS = 500


@dataclass(frozen=True, slots=True)
class Done:
    """A command to a run, or a decision of the scheduler. `at`: Unix seconds by its sender's clock, 0 where it did not say.
    `action`: in words."""

    at: float
    action: str
    by: str
    reason: str


def commanded(command: RunCommand, at: float) -> Done:
    going_back = command.action == "rollback"
    what = f"rollback to version {command.serial}" if going_back else command.action
    return Done(at, what, command.by, command.reason)


def decided(before: RunStatus | None, now: RunStatus) -> Done | None:
    """Return what was done between two statuses of a run other than by a command; None: nothing. `before`: None: none was heard."""
    if now.damaged not in (-1, before.damaged if before else -1):
        return Done(now.number / 1000, f"version {now.damaged} is damaged: to be published again", BY_SCHEDULER, "")
    return Done(now.since, f"is {now.state}", decided_by(now), now.reason) if is_decision(before, now) else None
