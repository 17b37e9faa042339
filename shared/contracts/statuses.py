"""What runs there are, as one reader of `runs.state` knows it: the newest status of each run.

The topic is compacted by run, so that a reader that starts late hears at least the last status of each. It may hear older ones
too, and again: a scheduler that died before it noted that it had published a status publishes it again, as does one that stood
still in the middle, perhaps after the run was resumed. Numbers tell which is newer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.contracts.life import RunState
from shared.contracts.messages import BY_SCHEDULER, RunStatus

AHEAD_MS = 86_400_000  # by so much two clocks may differ


def decided_by(status: RunStatus) -> str:
    """Return who decided that the run is in its state. The scheduler alone finishes runs, whoever told it to stop."""
    return BY_SCHEDULER if status.state is RunState.finished else status.by


def is_decision(before: RunStatus | None, now: RunStatus) -> bool:
    """Return whether the run entered its state between two statuses by no command that the second one answers. `before`: None: none
    was heard."""
    return not now.answers and (before is None or (before.state, before.since) != (now.state, now.since))


class Statuses:
    """A fold over statuses in the order of the topic."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds."""
        self._newest: dict[str, RunStatus] = {}
        self._numbers: dict[str, int] = {}
        self._clock = clock

    def hear(self, status: RunStatus) -> bool:
        """Return whether `status` holds now; False: a newer one was heard. The newest holds each time that it is heard. A number
        from the future proves nothing, and keeps no later status out."""
        last = self._numbers.get(status.run, 0)
        if status.number < last:
            return False
        if status.number < 1000 * self._clock() + AHEAD_MS:
            self._numbers[status.run] = status.number
        self._newest[status.run] = status
        return True

    def of(self, run: str) -> RunStatus | None:
        """Return the newest status of a run; None: none was heard."""
        return self._newest.get(run)

    @property
    def started(self) -> list[RunStatus]:
        """Of the runs that have a configuration, in the order in which they were started."""
        return sorted((one for one in self._newest.values() if one.configs), key=lambda one: (one.started, one.run))

    @property
    def unbound(self) -> list[RunStatus]:
        """Of the runs that a trainer or an engine may take whose settings name none: all but those that were started beside others.
        The one started last comes first."""
        return [one for one in reversed(self.started) if not one.beside]

    @property
    def followed(self) -> RunStatus | None:
        """Of the run that a trainer follows whose settings name none, also after its end. None: none was started."""
        return next(iter(self.unbound), None)
