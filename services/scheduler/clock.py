"""The scheduler's time: Unix seconds that never go back.

What it enters has an order, its statuses carry the time as their number, and every lease and pause is a
difference of two times. A machine's clock that is set back (a time server, a virtual machine that was moved) would hold all
of them up for as much as it went back, and make statuses look old to their readers. Where it is set forward this one
follows; the desk takes such a gap for one in which nobody listened.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from shared.contracts.statuses import AHEAD_MS

AHEAD_S = AHEAD_MS / 1000  # what is later than this the ledger is not believed, as readers of statuses believe none
JUMP_S = 1.0  # less is the ordinary correction of a clock

log = structlog.get_logger()


class Clock:
    """One for each term. Not for several threads at a time."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._steady = wall, steady
        self._ahead = 0.0  # of the machine's clock
        self._last, self._last_steady = float("-inf"), 0.0

    def not_before(self, entered: float) -> None:
        """`entered`: the latest time in the ledger."""
        now = self.now()
        if now < entered < now + AHEAD_S:
            self._go_on_from(entered, now)
            self._last = entered

    def now(self) -> float:
        steady = self._steady()
        now = self._wall() + self._ahead
        expected = self._last + steady - self._last_steady
        if now < self._last:
            self._go_on_from(expected, now)
            now = expected
        elif self._ahead and now - expected > JUMP_S:  # set right again
            right = min(self._ahead, now - expected)
            self._ahead, now = self._ahead - right, now - right
        self._last, self._last_steady = now, steady
        return now

    def _go_on_from(self, expected: float, now: float) -> None:
        self._ahead += expected - now
        if expected - now > JUMP_S:
            log.warning("clock_went_back", seconds=round(expected - now, 3))
