"""What a person may do to a run, by the state that it is in, and what was done when. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.ledger.transitions import RUN_MOVES, RunState

Action = Literal["pause", "resume", "stop", "rollback"]
LEADS_TO = {
    "start": RunState.running,
    "resume": RunState.running,
    "pause": RunState.paused,
    "stop": RunState.stopping,
    "finished": RunState.finished,
}
REASON_CHARS = 500
# A finished run is gone on with by `etude`, with a larger budget: by itself it would end again at once.
_OFFERED: dict[RunState, tuple[Action, ...]] = {
    RunState.running: ("pause", "rollback", "stop"),
    RunState.paused: ("resume", "rollback", "stop"),
    RunState.stopping: ("resume",),
}


@dataclass(frozen=True, slots=True)
class Done:
    """One message of `runs.control`. `at`: Unix seconds by its sender's clock, 0 where it did not say. `action`: in words."""

    at: float
    action: str
    by: str
    reason: str


def allowed(state: RunState) -> tuple[Action, ...]:
    return _OFFERED.get(state, ())


def follow(state: RunState, action: str) -> RunState:
    """Where a run is after this word, as the scheduler takes it: one that does not fit its state changes nothing."""
    target = LEADS_TO.get(action, state)
    return target if action == "finished" or target in RUN_MOVES[state] else state
