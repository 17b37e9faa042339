"""Asks the ledger what of a run's objects is needed and lets the rest go (see garbage). Deletes only when told to.

Invariants
- Objects are listed before the ledger is read: what appears later is newer than what the ledger says.
- The newest version stays, what a replica serves, what was ever promoted, and what an open evaluation is of.
- However many objects and attempts a run has, so many at a time are in memory (`CHUNK`); of versions all numbers are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

import msgspec
from sqlalchemy import Connection, Engine, select

from services.scheduler import rotation
from services.scheduler.garbage import Garbage, Known, left_behind, routing, versions
from services.scheduler.intake import PROMOTED
from services.scheduler.records import ReplicaState, of_row
from shared.contracts.ids import OPEN_EVALUATIONS, parse_attempt, parse_checkpoint, parse_policy
from shared.contracts.lineage import Fork, Lineage
from shared.contracts.messages import EvalRequested
from shared.ledger.models import Attempt, Event, Group, Incarnation, Policy, Replica, Trained
from shared.ledger.transitions import GROUP_MOVES, LIVE, GroupState
from shared.objects import ObjectDamaged, ObjectMissing, Objects

OVER = frozenset(state for state in GroupState if not GROUP_MOVES[state])
CHUNK = 2000  # objects; two requests of a listing, and some hundreds of attempts to ask the ledger about

T = TypeVar("T")


def chunks(things: Iterable[T]) -> Iterator[list[T]]:
    source = iter(things)
    while chunk := list(itertools.islice(source, CHUNK)):
        yield chunk


def known(connection: Connection, run: str, attempts: Collection[str]) -> dict[str, Known]:
    """Of these attempts, what the ledger says."""
    asked = select(Attempt.attempt_id, Attempt.epoch, Attempt.state, Attempt.trajectory, Attempt.checkpoint)
    rows = connection.execute(asked.where(Attempt.run_id == run, Attempt.attempt_id.in_(attempts)))
    found = {}
    for name, epoch, state, trajectory, checkpoint in rows:
        there = parse_attempt(trajectory.key) if trajectory else None
        found[name] = Known(epoch, state not in LIVE, there.epoch if there else None, checkpoint is not None)
    return found


def untrainable(
    connection: Connection, run: str, attempts: Collection[str], checkpoints: Iterable[str]
) -> dict[str, str]:
    """Those of `attempts` whose group no trainer asks for again, with the reason. `checkpoints`: keys, among them all of those
    that a trainer may resume from; what came after the oldest of them may be trained once more."""
    forks = select(Incarnation.incarnation, Incarnation.step, Incarnation.parent).where(Incarnation.run_id == run)
    lineage = Lineage({number: Fork(parent, step) for number, step, parent in connection.execute(forks)})
    places = [there for key in checkpoints if (there := parse_checkpoint(key)) and there.name == "manifest.json"]
    floor = min((lineage.shared(there.incarnation, there.step) for there in places), default=0)
    members = select(Attempt.attempt_id, Group.state, Trained.incarnation, Trained.step).join(
        Group, (Group.run_id == Attempt.run_id) & (Group.group_id == Attempt.group_id)
    )
    facts = members.outerjoin(Trained, (Trained.run_id == Group.run_id) & (Trained.group_id == Group.group_id))
    found = {}
    asked = facts.where(Attempt.run_id == run, Attempt.attempt_id.in_(attempts))
    for attempt, state, incarnation, step in connection.execute(asked):
        if GroupState(state) in OVER:
            found[attempt] = f"its group was {state}"
        elif incarnation is not None and lineage.survives(incarnation, step) and step <= floor:
            found[attempt] = f"trained by step {step}, which every checkpoint holds"
    return found


def built_from(connection: Connection, run: str) -> dict[int, int]:
    """Every version's serial, with that of its parent; -1: a full base."""
    rows = connection.execute(select(Policy.serial, Policy.parent).where(Policy.run_id == run))
    return {serial: parent for serial, parent in rows}


def served(connection: Connection, run: str, patience_s: float) -> set[int]:
    """Versions that replicas serve. `patience_s`: see `rotation`."""
    told = select(Policy.serial, Policy.incarnation, Policy.step, Policy.published_at).where(Policy.run_id == run)
    policies = {serial: (incarnation, step, at) for serial, incarnation, step, at in connection.execute(told)}
    rows = connection.execute(select(*Replica.__table__.columns).where(Replica.run_id == run))
    replicas = {row.replica: of_row(ReplicaState, row) for row in rows}
    return rotation.served(replicas, policies, time.time(), patience_s)


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
        except (ObjectMissing, ObjectDamaged, msgspec.MsgspecError):
            continue  # its report came meanwhile, or the evaluator cannot read what is asked for either
    return found


def unneeded(
    connection: Connection,
    objects: Objects,
    run: str,
    keys: Collection[str],
    *,
    patience_s: float,
    checkpoints: Collection[str] | None,
    last: int | None,
) -> list[Garbage]:
    """Those of `keys` that may go; they were listed before. `checkpoints`: all keys of theirs, listed before too: then routing
    goes of what every one of them has trained; `last`: weights too, but of so many of the newest versions."""
    named = {there.attempt for key in keys if (there := parse_attempt(key)) and there.run == run}
    found = {one.key: one for one in left_behind(run, keys, known(connection, run, named))} if named else {}
    if named and checkpoints is not None:
        found |= {one.key: one for one in routing(run, keys, untrainable(connection, run, named, checkpoints))}
    if last is not None and any(parse_policy(key) and key.endswith(".bin") for key in keys):
        parents = built_from(connection, run)
        newest = sorted(parents)[-max(1, last) :]
        kept = {*newest, *served(connection, run, patience_s), *promoted(connection, run), *evaluated(objects, run)}
        found |= {one.key: one for one in versions(run, keys, parents, kept)}
    return list(found.values())


def checkpoints_of(objects: Objects, run: str) -> list[str]:
    return list(objects.list(f"runs/{run}/checkpoints/"))


def sweep(
    engine: Engine,
    objects: Objects,
    run: str,
    *,
    patience_s: float,
    delete: bool,
    trained: bool = False,
    last: int | None = None,
) -> Iterator[Garbage]:
    """What may go, and is gone when it is told, if `delete`."""
    checkpoints = checkpoints_of(objects, run) if trained else None
    for folder in ("attempts", *(() if last is None else ("policies",))):
        for keys in chunks(objects.list(f"runs/{run}/{folder}/")):
            with engine.begin() as connection:
                found = unneeded(
                    connection, objects, run, keys, patience_s=patience_s, checkpoints=checkpoints, last=last
                )
            for one in found:
                if delete:
                    objects.delete(one.key)
                yield one
