"""Asks the ledger what of a run's objects is needed and lets the rest go (see garbage). Deletes only when told to.

Invariants
- Objects are listed before the ledger is read: what appears later is newer than what the ledger says.
- The newest version stays, what a replica serves, what was ever promoted, and what an open evaluation is of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec
from sqlalchemy import Connection, select

from services.scheduler.garbage import Garbage, Known, left_behind, routing, versions
from services.scheduler.intake import PROMOTED
from shared.contracts.ids import OPEN_EVALUATIONS, parse_attempt, parse_checkpoint
from shared.contracts.lineage import Fork, Lineage
from shared.contracts.messages import EvalRequested
from shared.ledger.models import Attempt, Event, Group, Incarnation, Policy, Replica, Trained
from shared.ledger.transitions import GROUP_MOVES, LIVE, GroupState
from shared.objects import ObjectMissing, Objects

OVER = frozenset(state for state in GroupState if not GROUP_MOVES[state])


def known(connection: Connection, run: str) -> dict[str, Known]:
    rows = connection.execute(
        select(Attempt.attempt_id, Attempt.epoch, Attempt.state, Attempt.trajectory).where(Attempt.run_id == run)
    )
    found = {}
    for name, epoch, state, trajectory in rows:
        there = parse_attempt(trajectory.key) if trajectory else None
        found[name] = Known(epoch, state not in LIVE, there.epoch if there else None)
    return found


def untrainable(connection: Connection, run: str, checkpoints: Iterable[str]) -> dict[str, str]:
    """Attempts whose group no trainer asks for again, with the reason. `checkpoints`: keys, among them all of those that a
    trainer may resume from; what came after the oldest of them may be trained once more."""
    forks = select(Incarnation.incarnation, Incarnation.step, Incarnation.parent).where(Incarnation.run_id == run)
    lineage = Lineage({number: Fork(parent, step) for number, step, parent in connection.execute(forks)})
    places = [there for key in checkpoints if (there := parse_checkpoint(key)) and there.name == "manifest.json"]
    floor = min((lineage.shared(there.incarnation, there.step) for there in places), default=0)
    members = select(Attempt.attempt_id, Group.state, Trained.incarnation, Trained.step).join(
        Group, (Group.run_id == Attempt.run_id) & (Group.group_id == Attempt.group_id)
    )
    facts = members.outerjoin(Trained, (Trained.run_id == Group.run_id) & (Trained.group_id == Group.group_id))
    found = {}
    for attempt, state, incarnation, step in connection.execute(facts.where(Attempt.run_id == run)):
        if GroupState(state) in OVER:
            found[attempt] = f"its group was {state}"
        elif incarnation is not None and lineage.survives(incarnation, step) and step <= floor:
            found[attempt] = f"trained by step {step}, which every checkpoint holds"
    return found


def built_from(connection: Connection, run: str) -> dict[int, int]:
    """Every version's serial, with that of its parent; -1: a full base."""
    rows = connection.execute(select(Policy.serial, Policy.parent).where(Policy.run_id == run))
    return {serial: parent for serial, parent in rows}


def promoted(connection: Connection, run: str) -> set[int]:
    """Versions that somebody has promoted: an engine that starts again, or goes back, must find them."""
    query = select(Event.subject).where(Event.run_id == run, Event.kind == PROMOTED)
    return {int(serial) for serial in connection.execute(query).scalars()}


def evaluated(objects: Objects, run: str) -> set[int]:
    """Versions that evaluations are still of: their engine may have to build one once more."""
    found = set()
    for key in objects.list(f"{OPEN_EVALUATIONS}{run}/"):
        try:
            found.add(msgspec.json.decode(objects.get(objects.head(key)), type=EvalRequested).serial)
        except ObjectMissing:
            continue  # its report came meanwhile
    return found


def unneeded(
    connection: Connection, objects: Objects, run: str, keys: Collection[str], *, trained: bool, last: int | None
) -> list[Garbage]:
    """Those of `keys` that may go; they were listed before. `trained`: routing too, of what every checkpoint among `keys` has
    trained; `last`: weights too, but of so many of the newest versions."""
    found = {one.key: one for one in left_behind(run, keys, known(connection, run))}
    if trained:
        found |= {one.key: one for one in routing(run, keys, untrainable(connection, run, keys))}
    if last is not None:
        parents = built_from(connection, run)
        served = connection.execute(select(Replica.serial).where(Replica.run_id == run)).scalars()
        kept = {*sorted(parents)[-max(1, last) :], *served, *promoted(connection, run), *evaluated(objects, run)}
        found |= {one.key: one for one in versions(run, keys, parents, kept)}
    return list(found.values())


def sweep(
    connection: Connection, objects: Objects, run: str, *, delete: bool, trained: bool = False, last: int | None = None
) -> list[Garbage]:
    """What may go, and went if `delete`."""
    folders = {"attempts": True, "checkpoints": trained, "policies": last is not None}
    keys = [key for folder, asked in folders.items() if asked for key in objects.list(f"runs/{run}/{folder}/")]
    found = unneeded(connection, objects, run, keys, trained=trained, last=last)
    if delete:
        for one in found:
            objects.delete(one.key)
    return found
