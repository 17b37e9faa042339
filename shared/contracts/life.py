"""The life of a run: its states, and which command leads from which state to which. Pure, and the only place that says so.

Anybody may publish a command (`runs.commands`). The scheduler applies it by `after` and announces the state that the run is
in (`runs.state`). A command that does not apply changes nothing. CLI and console offer what `offered` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal


class RunState(StrEnum):
    announced = "announced"  # heard of, no configuration yet; the scheduler announces nothing of such a run
    running = "running"
    paused = "paused"  # nothing more is asked for, and what runs is finished
    stopping = "stopping"  # nothing more is asked for; the trainer finishes what it has in hand
    finished = "finished"


Action = Literal["start", "pause", "resume", "stop", "reconfigure", "rollback"]

# State -> the commands that apply -> the state that follows.
_AFTER: Mapping[RunState, Mapping[Action, RunState]] = {
    RunState.announced: {
        "start": RunState.running,
        "resume": RunState.running,  # its start was lost; it brings the configuration
        "stop": RunState.finished,  # there is nothing to end
    },
    RunState.running: {
        "pause": RunState.paused,
        "stop": RunState.stopping,
        "reconfigure": RunState.running,
        "rollback": RunState.running,
    },
    RunState.paused: {
        "pause": RunState.paused,  # with another `drain`
        "resume": RunState.running,
        "stop": RunState.stopping,
        "reconfigure": RunState.paused,
        "rollback": RunState.paused,
    },
    RunState.stopping: {"resume": RunState.running},
    RunState.finished: {"resume": RunState.running},  # with a larger budget, or it ends again at once
}

# Moves that the scheduler makes by itself: an alert pauses, a spent budget stops, a refused configuration ends the run.
_OWN: Mapping[RunState, frozenset[RunState]] = {
    RunState.announced: frozenset({RunState.finished}),
    RunState.running: frozenset({RunState.paused, RunState.stopping}),
    RunState.stopping: frozenset({RunState.finished}),
}

_OFFERED: Mapping[RunState, tuple[Action, ...]] = {
    RunState.running: ("pause", "rollback", "stop"),
    RunState.paused: ("resume", "rollback", "stop"),
    RunState.stopping: ("resume",),
}
UNFINISHED = (RunState.running, RunState.paused, RunState.stopping)


def after(state: RunState, action: Action) -> RunState | None:
    """Return the state that a run is in after this command; None: the command does not apply, and changes nothing."""
    return _AFTER[state].get(action)


def moves(state: RunState) -> frozenset[RunState]:
    """Return the states that a run may enter next, by a command or by the scheduler's own decision."""
    return frozenset(_AFTER[state].values()).union(_OWN.get(state, ())) - {state}


def offered(state: RunState) -> tuple[Action, ...]:
    """Return the commands that people are offered for one run. Each applies. A finished run is left out: resumed with the
    budget that it has spent it would end again at once."""
    return _OFFERED.get(state, ())
