"""What makes a trainer's life durable: incarnations, claimed by a conditional put, and step checkpoints.

runs/<run>/incarnations/<n>                      who continues what; created if absent
runs/<run>/checkpoints/<n>-<step>/state.safetensors   masters, moments, by name
runs/<run>/checkpoints/<n>-<step>/groups.json         ids of all groups that these weights were trained on
runs/<run>/checkpoints/<n>-<step>/manifest.json       written last
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.trainer.persistence import insist
from shared.contracts.ids import checkpoint_prefix, parse_checkpoint
from shared.contracts.lineage import Fork
from shared.contracts.messages import StepCommitted
from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.scratch import scratch
from shared.weights import Tensors

FORMAT = "etude-step-1"
ON_ITS_WAY = "checkpoint-"  # of the folders that a checkpoint passes through
KEEP = 2  # the newest, and one to fall back to if it is damaged

log = structlog.get_logger()


class Superseded(RuntimeError):
    """A newer incarnation trains this run. This process must not publish any more of it."""

    def __init__(self, run: str, why: str) -> None:
        super().__init__(f"run {run}: {why}")
        self.run = run


class NoneUsable(RuntimeError):
    """The run has checkpoints and none can be read. To begin with the base policy would throw its steps away: a person decides."""

    def __init__(self, run: str, keys: list[str]) -> None:
        super().__init__(
            f"run {run}: none of its {len(keys)} checkpoints can be used: {', '.join(keys)}; why each cannot stands in the log "
            f"before this. Put the objects back, or go on from a published version: etude rollback {run} --to SERIAL"
        )


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: int
    parent: int  # -1: none
    step: int  # continued from here; 0: the base policy
    trainer: str
    claimed_at: float  # wall-clock seconds, for people
    rollback: str = ""  # id of the command that it obeys (see rollback); "": none


class StepCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """`committed`: what was, or should have been, announced about the step. A restart announces it again."""

    format: str = FORMAT
    run: str
    incarnation: int
    step: int
    serial: int
    state: Ref
    groups: Ref
    committed: StepCommitted


@dataclass(frozen=True, slots=True)
class Resume:
    """Where to go on. `checkpoint` None: from the base policy. `weights`: in place of `state` where there is none, the
    published tensors to begin from, with fresh moments."""

    checkpoint: StepCheckpoint | None
    state: Mapping[str, Tensor] | None
    trained: frozenset[str]
    weights: Tensors | None = None

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0


def _incarnation_key(run: str, number: int) -> str:
    return f"runs/{run}/incarnations/{number:06d}"


def read_incarnations(objects: Objects, run: str) -> list[Incarnation]:
    """All that were ever claimed, in order."""
    keys = sorted(objects.list(f"runs/{run}/incarnations/"))
    return [msgspec.json.decode(objects.get(objects.head(key)), type=Incarnation) for key in keys]


def forks(incarnations: list[Incarnation]) -> dict[int, Fork]:
    return {i.incarnation: Fork(i.parent, i.step) for i in incarnations}


def claim(objects: Objects, run: str, trainer: str, resume: Resume, rollback: str = "") -> Incarnation:
    """Takes the next incarnation. Two that claim at once get different numbers; the higher one wins."""
    number = len(read_incarnations(objects, run))
    while True:
        # The first to continue a base policy without any checkpoint still has the incarnations before it as ancestors.
        parent = resume.checkpoint.incarnation if resume.checkpoint else number - 1
        mine = Incarnation(
            incarnation=number,
            parent=parent,
            step=resume.step,
            trainer=trainer,
            claimed_at=time.time(),
            rollback=rollback,
        )
        if objects.put_if_absent(_incarnation_key(run, number), msgspec.json.encode(mine)) is not None:
            return mine
        number += 1


def check_not_superseded(objects: Objects, mine: Incarnation, run: str) -> None:
    """Raises Superseded. Called before anything of this incarnation becomes visible."""
    try:
        objects.head(_incarnation_key(run, mine.incarnation + 1))
    except ObjectMissing:
        return
    raise Superseded(run, f"incarnation {mine.incarnation} is superseded by {mine.incarnation + 1}")


def write(
    objects: Objects,
    mine: Incarnation,
    committed: StepCommitted,
    state: Mapping[str, Tensor],
    trained: Collection[str],
    room: Path,
    saved: Callable[[], None] = lambda: None,
) -> Ref:
    """Durable when it returns; atomic: the manifest comes last. Older checkpoints beyond KEEP are deleted after it, and what
    earlier incarnations left of theirs when they died in between. `saved` is called once `state` is not needed any more."""
    with scratch(room, ON_ITS_WAY) as folder:
        path = folder / "state.safetensors"
        insist(lambda: save_file(dict(state), path))
        saved()
        return insist(lambda: _put(objects, mine, committed, path, trained))


def _put(objects: Objects, mine: Incarnation, committed: StepCommitted, state: Path, trained: Collection[str]) -> Ref:
    prefix = checkpoint_prefix(committed.run, mine.incarnation, committed.step)
    manifest = StepCheckpoint(
        run=committed.run,
        incarnation=mine.incarnation,
        step=committed.step,
        serial=committed.serial,
        state=objects.put_file(f"{prefix}/state.safetensors", state),
        groups=objects.put(f"{prefix}/groups.json", msgspec.json.encode(sorted(trained))),
        committed=committed,
    )
    check_not_superseded(objects, mine, committed.run)
    ref = objects.put(f"{prefix}/manifest.json", msgspec.json.encode(manifest))
    _prune(objects, mine, committed.run)
    return ref


def found(objects: Objects, run: str) -> list[tuple[int, int, str]]:
    """(incarnation, step, manifest key) of every whole checkpoint, the one to resume from first.

    That is the last step of the newest incarnation that has one. What an older incarnation wrote stays below it, whichever
    step it reached: the newer one had gone on from an earlier one. An incarnation that died before its first checkpoint has
    none, and the run goes on from those of the incarnations before it.
    """
    return _whole(_places(objects, run))


def _places(objects: Objects, run: str) -> dict[tuple[int, int], list[str]]:
    """(incarnation, step) -> the keys there, whole or not. One listing."""
    places: dict[tuple[int, int], list[str]] = {}
    for key in objects.list(f"runs/{run}/checkpoints/"):
        if there := parse_checkpoint(key):  # whatever else somebody put there is not ours
            places.setdefault((there.incarnation, there.step), []).append(key)
    return places


def _whole(places: Mapping[tuple[int, int], list[str]]) -> list[tuple[int, int, str]]:
    """See `found`."""
    manifests = ((*place, key) for place, keys in places.items() for key in keys if key.endswith("/manifest.json"))
    return sorted(manifests, reverse=True)


def _prune(objects: Objects, mine: Incarnation, run: str) -> None:
    places = _places(objects, run)
    whole = _whole(places)
    for incarnation, step, manifest in whole[KEEP:]:
        for key in sorted(places[incarnation, step], key=lambda key: key != manifest):
            objects.delete(key)  # the manifest first, so that no half checkpoint looks whole
    # Ours, or a later one's, may just be written. Earlier incarnations are over: none of theirs gets a manifest now.
    for place in places.keys() - {(incarnation, step) for incarnation, step, _ in whole}:
        if place[0] < mine.incarnation:
            for key in places[place]:
                objects.delete(key)


def manifests(objects: Objects, run: str) -> Iterator[StepCheckpoint]:
    """Readable checkpoints, the one to resume from first; why another is none is a warning."""
    return _readable(objects, run, found(objects, run))


def _readable(objects: Objects, run: str, whole: list[tuple[int, int, str]]) -> Iterator[StepCheckpoint]:
    for _, _, key in whole:
        try:
            manifest = msgspec.json.decode(objects.get(objects.head(key)), type=StepCheckpoint)
        except (ObjectMissing, ObjectDamaged, msgspec.DecodeError) as error:
            log.warning("checkpoint_unreadable", run=run, key=key, reason=str(error))
            continue
        if manifest.format == FORMAT:
            yield manifest
        else:
            log.warning("checkpoint_unreadable", run=run, key=key, reason=f"format {manifest.format!r}, not {FORMAT!r}")


def find(objects: Objects, run: str, room: Path) -> Resume:
    """The newest checkpoint of the surviving lineage that is whole; a damaged one is passed over, with a warning. The base policy
    only where there is no checkpoint at all. Raises NoneUsable."""
    while whole := found(objects, run):
        for manifest in _readable(objects, run, whole):
            try:
                state = load_state(objects, manifest, room)
                groups = msgspec.json.decode(objects.get(manifest.groups), type=list[str])
            except (ObjectMissing, ObjectDamaged, SafetensorError, msgspec.DecodeError) as error:
                log.warning("checkpoint_damaged", run=run, step=manifest.step, reason=str(error))
                continue
            return Resume(manifest, state, frozenset(groups))
        if found(objects, run) == whole:  # else a trainer that lives wrote another meanwhile, and deleted these
            raise NoneUsable(run, [key for _, _, key in whole])
    return Resume(None, None, frozenset())


def load_state(objects: Objects, manifest: StepCheckpoint, room: Path) -> dict[str, Tensor]:
    """`room`: where there is room for a whole one on its way."""
    with scratch(room, ON_ITS_WAY) as folder:
        path = folder / "state.safetensors"
        objects.get_file(manifest.state, path)
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
