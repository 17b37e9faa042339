"""Back to an earlier version because a person said so: a new incarnation that continues the version's, from its step.

Everything else follows from that as from any fork: its weights are published under a new serial, which every replica takes;
the ledger frees what was trained after the step; what the fork made too old is given up with a reason.

Invariants
- Said once, done once, whatever crashes: the incarnation names the word that it obeys, and its first checkpoint, written
  before anything else, keeps a restart from resuming the branch that was left. Without both it is done again.
- Masters and moments come from the step's checkpoint where there is one; else the masters are the published bf16 values and
  the moments begin anew. Either way the groups trained up to the step are known: each version's manifest names its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from services.trainer import checkpoints
from services.trainer.checkpoints import Resume, StepCheckpoint
from shared import weights
from shared.contracts import lineage
from shared.contracts.ids import policy_prefix
from shared.contracts.messages import Rollback, StepCommitted
from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, Objects

NOTE = "groups"  # of a version's manifest: the groups that its step trained, with their ages, as JSON
_NOWHERE = Ref(key="", size=0, checksum="")


class Impossible(ValueError):
    """This version cannot be gone back to; the text says why."""


def note(groups: Mapping[str, int]) -> dict[str, str]:
    """What a step's version says of it."""
    return {NOTE: msgspec.json.encode(groups).decode()}


def is_pending(objects: Objects, run: str, wanted: Rollback) -> bool:
    """Return whether no incarnation has obeyed it yet, or not so far that a restart would go on from there."""
    obeying = [i.incarnation for i in checkpoints.read_incarnations(objects, run) if i.rollback == wanted.id]
    saved = bool(obeying) and any(incarnation >= obeying[0] for incarnation, _, _ in checkpoints.found(objects, run))
    return not saved


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in the past of a version: which version it published, and what it trained."""

    serial: int
    incarnation: int
    step: int
    manifest: Ref
    groups: dict[str, int]


def resume(objects: Objects, run: str, serial: int, room: Path) -> Resume:
    """Where the run goes on. Raises Impossible."""
    past = _past(objects, run, serial)
    if not past:
        raise Impossible(f"version {serial} is the base policy: start a new run from it")
    last = past[0]
    for checkpoint in checkpoints.manifests(objects, run):
        if (checkpoint.committed.incarnation, checkpoint.step) == (last.incarnation, last.step):
            try:
                state = checkpoints.load_state(objects, checkpoint, room)
                groups = msgspec.json.decode(objects.get(checkpoint.groups), type=list[str])
            except (ObjectMissing, ObjectDamaged, SafetensorError, msgspec.DecodeError):
                break
            return Resume(checkpoint, state, frozenset(groups))
    where: dict[str, Any] = {"run": run, "incarnation": last.incarnation, "step": last.step, "serial": last.serial}
    stands_for = StepCheckpoint(
        state=_NOWHERE, groups=_NOWHERE, committed=StepCommitted(groups=last.groups, **where), **where
    )
    try:
        tensors = weights.rebuild(objects, last.manifest)
    except weights.WeightsError as error:
        raise Impossible(f"version {serial}: {error}") from None
    return Resume(stands_for, None, frozenset(group for step in past for group in step.groups), tensors)


def _past(objects: Objects, run: str, serial: int) -> list[_Step]:
    """The steps that lead to a version, the last one first. Raises Impossible."""
    newest, _ = _version(objects, run, serial)
    forks = checkpoints.forks(checkpoints.read_incarnations(objects, run))
    ends = {**lineage.past(forks, newest.incarnation), newest.incarnation: newest.step}
    found = []
    for earlier in range(serial, -1, -1):
        manifest, ref = _version(objects, run, earlier)
        end = ends.get(manifest.incarnation)
        began = forks[manifest.incarnation].step if manifest.incarnation in forks else 0
        if end is None or not began < manifest.step <= end:
            continue  # of a dead branch, or the version that an incarnation began with
        if NOTE not in manifest.notes:
            raise Impossible(f"version {earlier} does not say what it was trained on: it is of an older release")
        groups = msgspec.json.decode(manifest.notes[NOTE], type=dict[str, int])
        found.append(_Step(earlier, manifest.incarnation, manifest.step, ref, groups))
    return found


def _version(objects: Objects, run: str, serial: int) -> tuple[weights.Manifest, Ref]:
    try:
        ref = objects.head(f"{policy_prefix(run, serial)}/manifest.json")
        return weights.read_manifest(objects, ref), ref
    except (ObjectMissing, weights.WeightsError) as error:
        raise Impossible(
            f"version {serial}: {'it has no manifest' if isinstance(error, ObjectMissing) else error}"
        ) from None
