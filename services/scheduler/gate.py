"""How many groups may be asked for, and which complete group takes the next place in training. Pure.

Step t trains from the weights of step t - 1, so a token of version o has age t - 1 - o when step t trains it. The bound on age
says: train it in step o + max_staleness + 1 at the latest. Each step has `groups_per_step` places, and the trainer fills them
in the order in which the scheduler hands them out. So a group whose oldest version is o must get one of the first

    deadline(o) = (o + max_staleness + 1) × groups_per_step

places. A group gets its place when it is complete, not before.

**Invariant.** Sort the groups without a place by their oldest version. With `accepted` places handed out, the n-th of them
(n = 1, 2, …) would get place accepted + n. That place is within its deadline.

A group that gets a place is complete and gets place accepted + 1, which is no later than accepted + n. So every group is
trained in time, whichever attempts end first and however long they take. No event breaks the invariant:

- A group is asked for: only while the invariant holds with it (`room`).
- A complete group takes a place out of its turn: those before it move back by one. It waits unless all of them can (`placing`).
- A group is dropped, or the trainer sets one aside: the groups behind it move forward.
- An attempt is asked for again, or an older rollout of it arrives: it may stand on an older version only if the invariant
  holds with that version (`fits`). Else the request names a newer floor, or the rollout does not count.
- The trainer makes a step, or waits: no place changes.

A fork of the lineage alone can break it: it makes samples older after the fact. Groups that cannot be trained in time any more
then count for nothing here and are dropped (`in_time`).

The rule never waits for itself: a complete group waits for groups that are still sampled, and these wait for no step. The
first group of the order never waits once it is complete.

Versions are steps of the surviving lineage (`shared.contracts.lineage`); one of a dead branch may be negative.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """`accepted`, everywhere: places handed out in the surviving lineage, to groups trained or ready.
    `standing`, everywhere: the oldest version of each group without a place, rising."""

    max_staleness: int
    groups_per_step: int

    def deadline(self, oldest: int) -> int:
        """Return the last place in which a group of this oldest version may be trained."""
        return (oldest + self.max_staleness + 1) * self.groups_per_step

    def room(self, *, version: int, standing: Sequence[int], accepted: int, lead: int) -> int:
        """Return how many groups may be asked for. `version`: the lowest that a replica in rotation serves, on which they will
        stand. `lead`: see `pacing`; places beyond those of the step that trains from `version`.

        Groups of older versions come before the new ones, so only the new ones and those of newer versions must fit."""
        before = bisect_right(standing, version)
        ahead = (version + 1) * self.groups_per_step + lead - accepted - len(standing)
        spare = [self.deadline(version) - accepted - before]
        spare += [self.deadline(oldest) - accepted - n for n, oldest in enumerate(standing[before:], before + 1)]
        return max(0, min(ahead, *spare))

    def opening(self, *, accepted: int, running: int, lead: int) -> int:
        """Return the lowest version that lets `lead` ask for one group more. `running`: groups without a place."""
        return math.ceil((accepted + running + 1 - lead) / self.groups_per_step) - 1

    def fits(self, standing: Sequence[int], *, accepted: int) -> bool:
        """Return whether the invariant holds."""
        return all(accepted + n <= self.deadline(oldest) for n, oldest in enumerate(standing, 1))

    def placing(self, groups: Sequence[tuple[int, bool]], *, accepted: int) -> list[int]:
        """Return the indices of the groups that take the next places now, in order. `groups`: those without a place, by rising
        oldest version: that version, and whether the group is complete."""
        taken: list[int] = []
        spare = math.inf  # places by which every group that has been passed over can still move back
        for index, (oldest, complete) in enumerate(groups):
            if complete and spare >= 1:
                taken.append(index)
                spare -= 1
            elif (left := self.deadline(oldest) - accepted - index - 1) >= 0:  # else a fork has made it too old
                spare = min(spare, left)
        return taken

    def in_time(self, oldest: Iterable[int], *, trained: int) -> list[bool]:
        """Which ready groups can still be trained within the bound, in the ledger's order.

        `oldest` holds the oldest version of each waiting group, `trained` the places already used. The gate keeps this
        all True on one lineage. A fork makes samples older after the fact: (t - f) + (s - f) for one of dead step s; the
        groups that it made too old are left out here, and those behind them move up.
        """
        answers = []
        place = trained
        for version in oldest:
            step = place // self.groups_per_step + 1
            answers.append(step - 1 - version <= self.max_staleness)
            place += answers[-1]
        return answers
