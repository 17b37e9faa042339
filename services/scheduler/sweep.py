"""Objects of a run that nobody needs any more. Reads the ledger, decides purely, deletes only when told to.

Three kinds, the last two only when asked for:
- what attempts left behind that were given up;
- routing of groups that every checkpoint has trained, and of those that will never be trained;
- the weights of old versions.

Invariants
- Nothing else is ever named: checkpoints, packs, configurations, trajectories that count, manifests stay.
- What the ledger does not know is left alone, an attempt or a version: its first word may still be on its way.
- Of attempts: what the ledger refers to stays, whatever its state; so does everything of the newest epoch while it is not over.
- Of versions: one that stays can be built; so all stay that it is built from. The newest one stays, and what a replica serves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, select

from services.scheduler.lineage import Fork, Lineage
from shared.ledger.models import Attempt, Group, Incarnation, Policy, Replica, Trained
from shared.ledger.transitions import GROUP_MOVES, LIVE, GroupState
from shared.objects import Objects

KEY = re.compile(r"runs/(?P<run>[^/]+)/attempts/(?P<attempt>[^/]+)/(?P<epoch>\d+)/.+")
ROUTING = re.compile(r"runs/(?P<run>[^/]+)/attempts/(?P<attempt>[^/]+)/\d+/routing-[^/]+")
PAYLOAD = re.compile(r"runs/(?P<run>[^/]+)/policies/(?P<serial>\d+)/[^/]+\.bin")
CHECKPOINT = re.compile(r"runs/[^/]+/checkpoints/(?P<incarnation>\d+)-(?P<step>\d+)/manifest\.json")
OVER = frozenset(state for state in GroupState if not GROUP_MOVES[state])


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


def untrainable(connection: Connection, run: str, checkpoints: Iterable[str]) -> dict[str, str]:
    """Attempts whose group no trainer asks for again, with the reason. `checkpoints`: keys of those that a trainer may resume
    from; what came after the oldest of them may be trained once more."""
    forks = select(Incarnation.incarnation, Incarnation.step, Incarnation.parent).where(Incarnation.run_id == run)
    lineage = Lineage(Fork(*row) for row in connection.execute(forks))
    floor = min((lineage.shared(*place) for key in checkpoints if (place := _place(key))), default=0)
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


def _place(key: str) -> tuple[int, int] | None:
    match = CHECKPOINT.fullmatch(key)
    return (int(match["incarnation"]), int(match["step"])) if match else None


def routing(run: str, keys: Iterable[str], attempts: Mapping[str, str]) -> Iterator[Garbage]:
    """Those of `keys` that are routing of `attempts` (see `untrainable`). Pure."""
    for key in keys:
        match = ROUTING.fullmatch(key)
        if match is not None and match["run"] == run and match["attempt"] in attempts:
            yield Garbage(key, attempts[match["attempt"]])


def needed(parents: Mapping[int, int], kept: Iterable[int]) -> set[int]:
    """Versions that those `kept` are built from, and themselves. `parents`: serial -> that of its parent, -1: a full base."""
    found: set[int] = set()
    for serial in kept:
        while serial in parents and serial not in found:
            found.add(serial)
            serial = parents[serial]
    return found


def versions(run: str, keys: Iterable[str], parents: Mapping[int, int], kept: Collection[int]) -> Iterator[Garbage]:
    """Those of `keys` that are weights of a version that nobody needs. Manifests stay: they say what was trained. Pure."""
    stay = needed(parents, kept)
    for key in keys:
        match = PAYLOAD.fullmatch(key)
        if (
            match is not None
            and match["run"] == run
            and (serial := int(match["serial"])) in parents
            and serial not in stay
        ):
            yield Garbage(key, f"weights of version {serial}")


def sweep(
    connection: Connection, objects: Objects, run: str, *, delete: bool, trained: bool = False, last: int | None = None
) -> list[Garbage]:
    """What may go, and went if `delete`. `trained`: routing too; `last`: weights too, but of so many of the newest versions.
    The keys are listed first: what appears later is newer than what the ledger says."""
    keys = list(objects.list(f"runs/{run}/attempts/"))
    checkpoints = list(objects.list(f"runs/{run}/checkpoints/")) if trained else []
    weights = list(objects.list(f"runs/{run}/policies/")) if last is not None else []
    found = {one.key: one for one in garbage(run, keys, known(connection, run))}
    if trained:
        found |= {one.key: one for one in routing(run, keys, untrainable(connection, run, checkpoints))}
    if last is not None:
        rows = connection.execute(select(Policy.serial, Policy.parent).where(Policy.run_id == run))
        parents = {serial: parent for serial, parent in rows}
        served = connection.execute(select(Replica.serial).where(Replica.run_id == run)).scalars()
        kept = {*sorted(parents)[-max(1, last) :], *served}
        found |= {one.key: one for one in versions(run, weights, parents, kept)}
    if delete:
        for key in found:
            objects.delete(key)
    return list(found.values())
