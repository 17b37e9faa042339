"""Which run to take up next, where some cannot be read or served. Pure: the clock is handed in, no I/O."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from services.inference.following import Following

FAILURES_TOLERATED = 3
FIRST_DELAY_S, LAST_DELAY_S = 0.5, 15.0


def delay_after(failures: int) -> float:
    """Seconds until what has failed so often (from 1 on) is tried again."""
    return min(LAST_DELAY_S, FIRST_DELAY_S * 2 ** min(failures - 1, 30))


@dataclass(slots=True)
class Unread:
    """A run that could not be taken up: what is missing of it, how often that was found, when (monotonic) it is looked for
    again. `alone`: only while nothing is served, for the try would end that."""

    what: str
    failures: int = 0
    again_at: float = 0.0
    alone: bool = False


@dataclass(slots=True)
class Candidates:
    """`unread`: runs that would rather be served than what is, and cannot be."""

    following: Following
    unread: dict[str, Unread] = field(default_factory=dict)

    def preferred(self, served: str) -> list[str]:
        """The runs that would rather be served than this one, the best first."""
        if self.following.promotions and not self.following.past_heard:
            return []
        return list(itertools.takewhile(lambda run: run != served, self.following.runs()))

    def next(self, served: str, now: float) -> str | None:
        """The run to take up now; None: what is served stays."""
        for run in self.preferred(served):
            unread = self.unread.get(run)
            if unread is not None and unread.alone and served:
                continue
            if unread is None or unread.again_at <= now:
                return run
            if unread.failures < FAILURES_TOLERATED:  # perhaps the store's, for a moment: no reason to start an engine
                return None
        return None

    def put_off(self, run: str, what: str, now: float, share: float, *, alone: bool = False) -> bool:
        """It is tried again after this share of the delay; `alone`: what served was ended for it, in vain, and at once another
        one comes into question. Returns whether this failure is the one to be told."""
        unread = self.unread.setdefault(run, Unread(what))
        before = unread.failures
        unread.what, unread.alone = what, unread.alone or alone
        unread.failures = max(before + 1, FAILURES_TOLERATED if alone else 0)
        unread.again_at = now + delay_after(unread.failures) * share
        return before < FAILURES_TOLERATED <= unread.failures

    def taken_up(self, run: str) -> list[str]:
        """It is served. Returns what nobody waits for any more; those that would end it are remembered."""
        waits = [unread.what for unread in self.unread.values()]
        self.unread = {other: unread for other, unread in self.unread.items() if unread.alone and other != run}
        return waits

    def outdated(self, served: str) -> list[str]:
        """Those that nobody prefers any more."""
        preferred = self.preferred(served)
        return [run for run in self.unread if run not in preferred]

    def due(self, served: str) -> float | None:
        """When the first of them is to be tried again."""
        return min((one.again_at for one in self.unread.values() if not (one.alone and served)), default=None)
