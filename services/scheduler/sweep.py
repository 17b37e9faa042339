"""Objects of attempts that nobody needs any more. Reads the ledger, decides purely, deletes only when told to.

Invariants
- Only `runs/<run>/attempts/<attempt>/<epoch>/…` is ever looked at. Weights, checkpoints, packs and configurations belong to
  others: who keeps a chain of versions alive knows which of them it needs.
- An attempt that the ledger does not know is left alone: its first word may still be on its way.
- What the ledger refers to stays, whatever its state; so does everything of an attempt's newest epoch while it is not over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, select

from shared.ledger.models import Attempt
from shared.ledger.transitions import LIVE
from shared.objects import Objects

KEY = re.compile(r"runs/(?P<run>[^/]+)/attempts/(?P<attempt>[^/]+)/(?P<epoch>\d+)/.+")


@dataclass(frozen=True, slots=True)
class Known:
    """What the ledger says of an attempt. `kept`: the epoch whose objects it refers to, None: none."""

    epoch: int
    over: bool
    kept: int | None


@dataclass(frozen=True, slots=True)
class Garbage:
    key: str
    why: str


def known(connection: Connection, run: str) -> dict[str, Known]:
    rows = connection.execute(
        select(Attempt.attempt_id, Attempt.epoch, Attempt.state, Attempt.trajectory).where(Attempt.run_id == run)
    )
    found = {}
    for name, epoch, state, trajectory in rows:
        match = KEY.fullmatch(trajectory.key) if trajectory else None
        found[name] = Known(epoch, state not in LIVE, int(match["epoch"]) if match else None)
    return found


def garbage(run: str, keys: Iterable[str], attempts: Mapping[str, Known]) -> Iterator[Garbage]:
    """Those of `keys` that may go, with the reason. Pure."""
    for key in keys:
        match = KEY.fullmatch(key)
        if match is None or match["run"] != run or match["attempt"] not in attempts:
            continue
        attempt, epoch = attempts[match["attempt"]], int(match["epoch"])
        if epoch == attempt.kept or epoch > attempt.epoch:
            continue
        if epoch < attempt.epoch:
            yield Garbage(key, f"epoch {epoch} was given up; the attempt is at epoch {attempt.epoch}")
        elif attempt.over:
            yield Garbage(key, "the attempt ended without a trajectory that counts")


def sweep(connection: Connection, objects: Objects, run: str, *, delete: bool) -> list[Garbage]:
    """What may go, and went if `delete`. The keys are listed first: what appears later is newer than what the ledger says."""
    keys = list(objects.list(f"runs/{run}/attempts/"))
    found = list(garbage(run, keys, known(connection, run)))
    if delete:
        for one in found:
            objects.delete(one.key)
    return found
