"""How long nothing was heard, counting only time in which somebody listened. Pure.

A worker's silence means something only if its words would have been read. Three kinds of time therefore do not count:
- time after `upto`: the bus may hold words that were said then and have not been read yet;
- time before `deaf_until`: the bus could not be asked what it holds;
- the part beyond ABSENT_S of each gap between two batches. A slow batch then delays a lease, but never suspends it.

The ledger keeps the state (`state`), so that the next process continues it: its start is one more gap. Otherwise a scheduler
that dies again and again would never come to the end of a patience that is longer than its lives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ABSENT_S = (
    3.0  # of a longer gap between two batches only so much counts: the process was busy, stopped, or its clock was set
)
MOST_GAPS = 10_000  # at one every three seconds: eight hours
# In the ledger: the newest half of them as they are; of older ones every second, or fourth, and so on. Of one that is left out
# remains that it came before the next one that is kept.
KEPT_GAPS = 64


@dataclass(slots=True)
class Listening:
    """`upto`: everything that workers and graders said before it has been handled."""

    upto: float = float("-inf")
    deaf_until: float = float("-inf")
    last: float | None = None  # the time of the last batch; None: there was none yet
    _ends: list[float] = field(default_factory=list)  # when each long gap ended
    _lost: list[float] = field(default_factory=list)  # seconds that do not count, up to and with each of them
    _continued: bool = False  # the next batch is the first of this process

    def state(self) -> dict[str, Any]:
        """Return what a later process needs to go on, as JSON. Fewer gaps are kept than there are: an earlier one then counts
        as if it came right before the next one that is kept, which can only delay."""
        half, kept = KEPT_GAPS // 2, list(range(len(self._ends)))
        older, newer = (kept[:-half], kept[-half:]) if len(kept) > KEPT_GAPS else ([], kept)
        while len(older) > half:
            older = older[(len(older) - 1) % 2 :: 2]  # the newest of them stays
        ends, lost = ([of[i] for i in (*older, *newer)] for of in (self._ends, self._lost))
        deaf_until = None if self.deaf_until == float("-inf") else self.deaf_until
        return {"last": self.last, "deaf_until": deaf_until, "ends": ends, "lost": lost}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what an earlier process has written down (`state`). What was said since then may be unread."""
        self.last, self._ends, self._lost = state["last"], list(state["ends"]), list(state["lost"])
        self.deaf_until = float("-inf") if state["deaf_until"] is None else state["deaf_until"]
        self._continued = self.last is not None

    def batch(self, now: float, *, heard: bool, upto: float | None) -> None:
        """Note a batch. `heard` False: nobody knows whether words are waiting. `upto` None: nothing is known to wait."""
        if self._continued:
            upto = self.last if upto is None else min(upto, self.last or now)
            self._continued = False
        if self.last is None or now < self.last or not heard:
            self.deaf_until = now
            self._ends.clear()
            self._lost.clear()
        elif now - self.last > ABSENT_S:
            self._ends.append(now)
            self._lost.append((self._lost[-1] if self._lost else 0.0) + now - self.last - ABSENT_S)
            if len(self._ends) > MOST_GAPS:  # what came before counts for nothing then: that only delays
                self.deaf_until = self._ends[MOST_GAPS // 2]
                del self._ends[: MOST_GAPS // 2], self._lost[: MOST_GAPS // 2]
        self.last = now
        self.upto = now if upto is None else min(now, upto)

    def since(self, then: float, now: float | None = None) -> float:
        """Return the seconds from `then` on in which somebody listened. `now`: as if everything up to it had been read; None:
        as far as it has been read. At most 0: it is not known that there was any."""
        upto = self.upto if now is None else now
        begin = max(then, self.deaf_until)
        passed = bisect_right(self._ends, begin)
        absent = (self._lost[-1] if self._lost else 0.0) - (self._lost[passed - 1] if passed else 0.0)
        return upto - begin - absent
