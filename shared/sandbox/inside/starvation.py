"""Tells when a cgroup starves: its programs hold all of its memory, and it still does not run out.

Near the limit the kernel drops the pages of programs' own files, which it can read again, and counts that as progress: a program
that reads its next instruction from the disk goes on for minutes, at a few pages a second, before the kernel ends anything.
"""

from __future__ import annotations

from dataclasses import dataclass

LOOK_S = 0.5  # between two looks
_HELD = 0.95  # of the limit: what can be dropped is nearly gone
_STARVED_S = 5.0
_FAULTS = (
    25  # in that time: pages that were read from the disk again. One that holds much and has what it needs reads none
)


@dataclass
class Starvation:
    """`look` at least every second or two. A group that has room again, or reads nothing, begins anew."""

    _since: float | None = None
    _faults: int = 0

    def look(self, now: float, held: int, limit: int, faults: int) -> bool:
        """Return whether the group starves; then it begins anew. `now`: seconds, of any clock; `held`: bytes that cannot be
        dropped; `faults`: pages that were read from the disk so far."""
        if held < _HELD * limit:
            self._since = None
            return False
        if self._since is None:
            self._since, self._faults = now, faults
        if now - self._since < _STARVED_S:
            return False
        starves = faults - self._faults >= _FAULTS
        self._since, self._faults = now, faults
        return starves
