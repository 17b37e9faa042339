"""How many groups may be asked for now, so that no sample grows older than the bound. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """Paces instead of discarding: one rule bounds both the queue and the age of every sample.

    Step t trains with the weights of step t - 1, so a token of version o has age (t - 1) - o when it is trained, and the
    bound says: trained in step o + max_staleness + 1 at the latest. All groups that were or will be trained up to then
    fit into (o + max_staleness + 1) × groups_per_step places. So a new group may be asked for while everything accepted
    and running, itself included, fits into the places of the oldest version that anything unfinished stands on; in
    whatever order the unfinished ones become ready then, none comes too late. Ready groups have their place already: the
    trainer keeps the ledger's order. Counting them too would stop all sampling until the last of them is trained.

    - `version`: the lowest one applied by a replica in rotation: the oldest that a new attempt can stand on.
    - `oldest`: the oldest version of any attempt of a group that is not ready. Without it the rule bounds only the
      count: the queue stays short while one slow attempt grows old without end.
    - `accepted`: groups trained or ready in the surviving lineage; dropped and failed ones never were.
    - `running`: groups asked for and not complete.

    Versions are steps of the surviving lineage (`shared.contracts.lineage`); one of a dead branch may be negative.
    """

    max_staleness: int
    groups_per_step: int

    def room(self, *, version: int, oldest: int, accepted: int, running: int) -> int:
        horizon = min(version, oldest) + self.max_staleness + 1
        return max(0, horizon * self.groups_per_step - accepted - running)

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
