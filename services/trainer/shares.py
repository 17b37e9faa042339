"""Where a trainer's time goes. Pure but for the clock.

Every moment belongs to one phase, so the shares add up to 100 %:

    waiting        no batch of groups was ready
    packing        forming the batch and laying out its micro-batches
    computing      forward, backward, optimiser
    publishing     copying the version's bits, and waiting for the version before it to be durable
    checkpointing  collecting the state, and waiting until a checkpoint before it was read or written

What a background thread does while the trainer computes costs the trainer nothing, and is in none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PHASES = ("waiting", "packing", "computing", "publishing", "checkpointing")


class Shares:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._reported = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> float:
        """Count the time since the last lap as `phase`. Return it in seconds."""
        now = self._clock()
        spent, self._last = now - self._last, now
        self._seconds[phase] += spent
        return spent

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count some of what was counted as `source` as `target`; at most all of it."""
        seconds = min(max(0.0, seconds), self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase up to the last lap, and begin again."""
        taken, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        for phase, seconds in taken.items():
            self._reported[phase] -= seconds
        return taken

    def report(self) -> dict[str, float]:
        """Return the seconds of each phase up to the last lap that no report has had yet, whoever has taken them."""
        fresh = {phase: seconds - self._reported[phase] for phase, seconds in self._seconds.items()}
        self._reported = dict(self._seconds)
        return fresh


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Return `share_<phase>`: 0 to 1, together 1; all 0 if no time has passed."""
    total = sum(seconds.values())
    return {f"share_{phase}": spent / total if total else 0.0 for phase, spent in seconds.items()}
