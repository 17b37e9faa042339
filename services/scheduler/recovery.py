"""A ledger that is behind the object store: what checkpoints contain is trained, and trainers that claimed their place began,
whatever the ledger says.

A database that fails over to a replica, or is restored from a backup, may have lost its last commits. Their messages were
acknowledged and never come again. So whenever a run is loaded, its ledger is compared with the newest checkpoint, which
names every group that the weights were trained on. A checkpoint is also written shortly before its step is announced, so
being behind by that step is normal; the commit then settles it. A trainer claims its incarnation there right before it says
that it began, so one that the ledger never heard of counts as begun.

Invariants:
- A group that a checkpoint contains is never trained again, and its problem is not drawn again.
- A ledger that is behind gives no group a name that it may have given to another one before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import structlog

from services.scheduler.decisions import abandon
from services.scheduler.records import GROUPS_PER_PROBLEM
from services.scheduler.working_set import WorkingSet
from shared.contracts.ids import checkpoint_prefix, group_id, parse_checkpoint, policy_prefix
from shared.contracts.messages import IncarnationStarted
from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, Objects

CONTAINS = "checkpoint.contains"  # an event's kind: groups of a checkpoint that the ledger did not know to be trained
SKIPPED = 2  # numbers of groups per problem, which a lost commit may have used
NUMBERS = GROUPS_PER_PROBLEM + SKIPPED  # after those in the ledger, that a group which it has lost may have
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The newest checkpoint of a run. `serial`: the version that it is. `groups`: every group that it was trained on."""

    incarnation: int
    step: int
    serial: int
    groups: frozenset[str]


class _Claim(msgspec.Struct):
    """What we need of a trainer's claim (services/trainer/checkpoints.py)."""

    incarnation: int
    step: int
    parent: int


def begun(objects: Objects, run: str, after: int) -> list[IncarnationStarted]:
    """Return the trainers' lives later than incarnation `after`, as they claimed them, in order."""
    root = f"runs/{run}/incarnations/"
    numbered = ((key.removeprefix(root), key) for key in objects.list(root))
    keys = sorted(key for number, key in numbered if number.isdigit() and int(number) > after)
    claims = [msgspec.json.decode(objects.get(objects.head(key)), type=_Claim) for key in keys]
    return [IncarnationStarted(run=run, incarnation=c.incarnation, step=c.step, parent=c.parent) for c in claims]


def newest_version(objects: Objects, run: str, known: int) -> int:
    """Return the newest version that has a manifest. `known`: one that has, or -1. Serials rise by one, and manifests stay.

    Names are enough: the scheduler's key may not read weights."""
    while f"{policy_prefix(run, known + 1)}/manifest.json" in set(objects.list(f"{policy_prefix(run, known + 1)}/")):
        known += 1
    return known


class _Manifest(msgspec.Struct):
    """What we need of a checkpoint's manifest."""

    serial: int
    groups: Ref


def newest(objects: Objects, run: str) -> Checkpointed | None:
    """Read what the newest whole checkpoint contains. None: there is none, or it cannot be read."""
    keys = [parse_checkpoint(key) for key in objects.list(f"runs/{run}/checkpoints/")]
    whole = sorted({(k.incarnation, k.step) for k in keys if k is not None and k.name == "manifest.json"}, reverse=True)
    for incarnation, step in whole[:1]:
        key = f"{checkpoint_prefix(run, incarnation, step)}/manifest.json"
        try:
            manifest = msgspec.json.decode(objects.get(objects.head(key)), type=_Manifest)
            groups = msgspec.json.decode(objects.get(manifest.groups), type=list[str])
            return Checkpointed(incarnation, step, manifest.serial, frozenset(groups))
        except (ObjectMissing, ObjectDamaged, msgspec.DecodeError) as error:
            log.warning("checkpoint_unreadable", run=run, key=key, error=str(error))
    return None


def recover(ws: WorkingSet, saved: Checkpointed, now: float) -> None:
    """Take over what the checkpoint contains and the ledger does not know to be trained."""
    if saved.incarnation <= ws.lineage.current and not ws.lineage.survives(saved.incarnation, saved.step):
        return  # of a branch that was cut off
    missing = saved.groups - ws.trained
    if not missing:
        return
    unknown = sorted(missing - ws.announced.keys())
    behind = saved.step > ws.tip + 1
    # Only the commit of the checkpoint's own step was not read yet.
    usual = saved.step == ws.tip + 1 and ws.config is not None and len(missing) <= ws.config.schedule.groups_per_step
    ws.tip = max(ws.tip, saved.step)
    for name in missing & ws.waiting.keys():
        ws.trained_upto = max(ws.trained_upto, ws.waiting.pop(name).sequence or 0)
    for name in missing & ws.open.keys():
        abandon(ws, ws.open[name], f"the checkpoint of step {saved.step} contains it: the ledger was behind", now)
    for problem in problems_of(ws, missing).values():
        ws.catalogue.take(problem)
    if unknown or not usual:
        ws.catalogue.skip(SKIPPED)
    ws.event(now, CONTAINS, str(saved.step), saved.incarnation, groups=sorted(missing))
    if saved.serial > max(ws.policies, default=-1):
        # Its publication, and that replicas took it, may be lost too. The trainer publishes its weights once more.
        ws.tell_damaged(saved.serial, now)
    if unknown or behind:
        ws.behind = True
        what = f"the ledger is behind the checkpoint of step {saved.step}: it has lost its last commits (docs/operations.md)"
        ws.alert(now, "ledger_behind", "critical", what, unknown)


def problems_of(ws: WorkingSet, groups: Collection[str]) -> dict[str, str]:
    """Return group -> its problem. A group that the ledger never heard of is recognised by its name, which its problem gives it.

    A search that finds nothing goes through the whole catalogue, so there is at most one per load of the run. A trainer that goes
    on naming strangers costs no more than that. Every step that names one raises an alert."""
    found = {name: ws.announced[name] for name in groups if name in ws.announced}
    found |= {name: ws.open[name].problem for name in groups if name in ws.open}
    new = set(groups) - found.keys() - ws.unheard.keys()
    if new:
        recognised = {} if ws.searched_in_vain else _search(ws, new)
        ws.searched_in_vain = not recognised
        ws.unheard |= dict.fromkeys(new) | recognised
    asked = {name: ws.unheard[name] for name in set(groups) & ws.unheard.keys() - found.keys()}
    return found | {name: problem for name, problem in asked.items() if problem is not None}


def _search(ws: WorkingSet, wanted: Collection[str]) -> dict[str, str]:
    """Return group -> its problem, of those that a problem of the catalogue gives its name."""
    found: dict[str, str] = {}
    ids, upto = ws.catalogue.ids, ws.catalogue.next_numbers() + NUMBERS
    for number in range(int(upto.max(initial=0))):
        for problem in ids if number < NUMBERS else (ids[handle] for handle in np.flatnonzero(upto > number).tolist()):
            if (name := group_id(ws.id, problem, number)) in wanted:
                found[name] = problem
                if len(found) == len(wanted):
                    return found
    return found


def take_trained(ws: WorkingSet, admitted: Iterable[str]) -> None:
    """Take the problems among those just admitted that a group trained of which the ledger never heard. It had lost them, too."""
    strangers = {name for name, problem in ws.unheard.items() if problem is None}
    if not strangers:
        return
    for problem in admitted:
        for name in {group_id(ws.id, problem, number) for number in range(NUMBERS)} & strangers:
            ws.unheard[name] = problem
            ws.catalogue.take(problem)
