"""Which run asks for the next group where several run at once. Pure: no clock, no I/O.

Rollout workers take requests in the order in which they were asked for. So runs share the workers' slots as they share the queue
of requests. The scheduler keeps that queue short, one for all runs together. Whenever it has room, the run with the lowest
account asks for a group:

    account = (slot-seconds used + slot-seconds that the attempts asked for will still use) / share

A slot-second is one second of one attempt in the hands of a worker. Time that an attempt will still use is estimated from the
attempts of its run that ended last. What was measured replaces the estimate as time passes, so a wrong estimate costs nothing in
the long run.

- Used slot-seconds follow the shares, however long attempts take. No attempt is ever taken from a worker for it: a run whose
  attempts last long may hold more than its share for a while, and then asks for less.
- No slot stays empty while a run could use it. A run that can ask for nothing (its gate is closed, it has no problems or no
  engine) leaves its share to the others. Its account rises with the lowest of theirs, so it is owed nothing for that time.
- A run that joins counts as if it had used as much for its share as the lowest of the others. What the others hold already is
  still charged to them, so after what is queued already the new run is served first, until it holds its share.
- A run of which no worker takes anything, while they take what others ask for, does not fill the queue for the others.

Accounts are in memory only. After a restart they begin with what every run has in flight.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

LASTED = 64  # attempts whose seconds are remembered, per run
GUESS_S = 1.0  # how long an attempt takes, while none was seen
GAP_S = 3.0  # of a longer time between two looks only so much counts for an attempt that ended in it
STALLED_S = 60.0  # workers took attempts of others for so long, and none of this run
HALF_LIFE_S = 300.0  # of the use that is reported


@dataclass(frozen=True, slots=True)
class Demand:
    """What a run could ask for, and what it has in flight.

    `share`: above 0. `groups`: how many it could ask for now, of `group_size` attempts each; 0: none. `queued`: attempts asked
    for that no worker has taken. `waits_since`: when the oldest of them was asked for; None: there is none. `taken`: attempts that
    workers hold, each with the time when one took it. `taken_at`: when a worker last took an attempt of the run; 0: never. Times
    in seconds."""

    share: float
    groups: int
    group_size: int
    queued: int
    waits_since: float | None
    taken: Mapping[Hashable, float]
    taken_at: float


@dataclass(frozen=True, slots=True)
class Use:
    """What a run is to have of the slots, and what it has. `share` and `used`: parts of 1 among the runs that run now; `used` of
    the slot-seconds of the last minutes. `slots`: attempts that workers hold now."""

    share: float
    used: float
    slots: int


@dataclass(slots=True)
class _Account:
    """`used`: slot-seconds over share. `recent`: slot-seconds, older ones fading."""

    used: float
    recent: float = 0.0
    taken: dict[Hashable, float] = field(default_factory=dict)
    lasted: deque[float] = field(default_factory=lambda: deque(maxlen=LASTED))


class Accounts:
    """Of the runs that run at the same time. `divide` at every look, `forget` when one runs alone."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._at: float | None = None  # of the last look

    def forget(self) -> None:
        self._accounts.clear()
        self._at = None

    def divide(self, demands: Mapping[str, Demand], now: float, room: int) -> dict[str, int]:
        """Return how many groups each run asks for now. `room`: attempts that may wait for a worker, of all runs together."""
        moved = {run: demand for run, demand in demands.items() if not _stalled(run, demands)}
        asking = {run: demand.groups for run, demand in moved.items() if demand.groups > 0}
        self._measure(demands, asking, now)
        seconds = {run: self._seconds(run, demands, now) for run in demands}
        standing = {run: self._standing(run, demands[run], seconds[run], now) for run in demands}
        self._catch_up(standing, asking, demands)
        left = room - sum(demand.queued for demand in moved.values())
        granted = dict.fromkeys(demands, 0)
        while asking:
            run = min(asking, key=lambda name: (standing[name], name))
            size = demands[run].group_size
            if size > left:  # a smaller group does not overtake it: it would wait without end
                break
            left -= size
            granted[run] += 1
            asking[run] -= 1
            if not asking[run]:
                del asking[run]
            standing[run] += size * seconds[run] / demands[run].share
        return granted

    def use(self, demands: Mapping[str, Demand]) -> dict[str, Use]:
        """Return what each run is to have and has, as of the last `divide`."""
        shares = sum(demand.share for demand in demands.values())
        recent = sum(self._accounts[run].recent for run in demands)
        return {
            run: Use(
                share=demand.share / shares,
                used=self._accounts[run].recent / recent if recent else 0.0,
                slots=len(demand.taken),
            )
            for run, demand in demands.items()
        }

    def _measure(self, demands: Mapping[str, Demand], asking: Mapping[str, int], now: float) -> None:
        """Charge what was used since the last look. Open the accounts of runs that have joined, close those of runs that left."""
        since = now if self._at is None else min(self._at, now)
        self._at = now
        for run in self._accounts.keys() - demands.keys():
            del self._accounts[run]
        for run, account in self._accounts.items():
            demand, used = demands[run], 0.0
            for attempt, taken_at in account.taken.items():
                if attempt not in demand.taken:
                    account.lasted.append(max(0.0, now - taken_at))
                    used += min(GAP_S, max(0.0, now - max(taken_at, since)))
            used += sum(max(0.0, now - max(taken_at, since)) for taken_at in demand.taken.values())
            account.used += used / demand.share
            account.recent = account.recent * 0.5 ** ((now - since) / HALF_LIFE_S) + used
            account.taken = dict(demand.taken)
        known = [self._accounts[run].used for run in self._accounts.keys() & asking.keys()]
        joins_at = min(known or (account.used for account in self._accounts.values()), default=0.0)
        for run in demands.keys() - self._accounts.keys():
            self._accounts[run] = _Account(joins_at, taken=dict(demands[run].taken))

    def _seconds(self, run: str, demands: Mapping[str, Demand], now: float) -> float:
        """Return how long an attempt of the run is held by a worker, as far as is known."""
        of_all = [seconds for account in self._accounts.values() for seconds in account.lasted]
        running = [max(0.0, now - at) for demand in demands.values() for at in demand.taken.values()]
        for known in (self._accounts[run].lasted, of_all, running):
            if known:
                return max(statistics.fmean(known), 1e-3)
        return GUESS_S

    def _standing(self, run: str, demand: Demand, seconds: float, now: float) -> float:
        """Return the run's account: used, and still to be used."""
        coming = demand.queued * seconds + sum(max(0.0, seconds - (now - at)) for at in demand.taken.values())
        return self._accounts[run].used + coming / demand.share

    def _catch_up(self, standing: dict[str, float], asking: Mapping[str, int], demands: Mapping[str, Demand]) -> None:
        """A run that asks for nothing collects no credit."""
        if not asking:
            return
        lowest = min(standing[run] for run in asking)
        for run in demands.keys() - asking.keys():
            if (behind := lowest - standing[run]) > 0:
                self._accounts[run].used += behind
                standing[run] = lowest


def _stalled(run: str, demands: Mapping[str, Demand]) -> bool:
    """Return whether workers take what other runs ask for, and nothing of this one's queue."""
    demand = demands[run]
    if demand.waits_since is None:
        return False
    others = max((other.taken_at for name, other in demands.items() if name != run), default=0.0)
    return others - max(demand.taken_at, demand.waits_since) > STALLED_S
