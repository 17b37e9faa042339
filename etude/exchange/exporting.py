"""Policies out of the object store, and checkpoints out of directories, to Hugging Face directories.

An exported policy is, bit for bit, the version that was published: every tensor is checked against its manifest.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from etude.exchange.card import read_card, write_json
from etude.exchange.checking import check
from etude.exchange.errors import NotExchanged
from etude.exchange.folder import complete, copy_small, normalised, whole
from etude.exchange.store import STORED, names, stored
from shared.contracts.ids import policy_prefix
from shared.contracts.run import Ref, RunConfig
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.renderers.card import CARD
from shared.weights import WeightsError, highest_serial, read_manifest, rebuild
from shared.weights.checkpoint_objects import NotACheckpoint, download_directory
from shared.weights.directory import write_tensors

UNREADABLE = (ObjectMissing, ObjectDamaged, NotACheckpoint)  # a checkpoint in the object store


@dataclass(frozen=True, slots=True)
class Exported:
    run: str
    serial: int
    step: int
    tensors: int
    directory: Path


def export_run(objects: Objects, run: str, out: Path, version: int | None = None) -> Exported:
    """One published version of a run, the newest unless `version` says otherwise. Raises NotExchanged."""
    config = _config(objects, run)
    newest = highest_serial(objects, run)
    if newest < 0:
        raise NotExchanged(f"run {run}: no version is published yet")
    serial = newest if version is None else version
    try:
        ref = objects.head(f"{policy_prefix(run, serial)}/manifest.json") if 0 <= serial <= newest else None
    except ObjectMissing:
        ref = None
    if ref is None:
        raise NotExchanged(f"run {run}: version {serial} is not in the store; published: 0 to {newest}")
    with whole(out) as folder:
        try:
            manifest, tensors = read_manifest(objects, ref), rebuild(objects, ref)
        except WeightsError as error:
            raise NotExchanged(f"run {run}, version {serial}: {error}") from None
        _base_files(objects, config.base, folder)
        write_tensors(tensors, folder)
        card = read_card(folder)
        card = {name: card[name] for name in ("format", "context") if name in card}
        card |= {"parent": f"{run}@{serial}", "run": run, "serial": serial, "step": manifest.step}
        write_json(folder / CARD, {**card, "checksum": manifest.checksum})
        complete(folder)
        about = f"Version {serial} (step {manifest.step}) of run {run}, trained with Étude from {config.base.key}."
        (folder / "README.md").write_text(f"{about}\n\nTensors: {len(tensors)}, checksum {manifest.checksum}.\n")
    return Exported(run, serial, manifest.step, len(tensors), out)


def export_stored(objects: Objects, name: str, out: Path) -> Path:
    """An imported checkpoint, as it lies in the store. Raises NotExchanged."""
    ref = stored(objects, name)
    with whole(out) as folder:
        try:
            download = download_directory(objects, ref, folder / ".download")
        except UNREADABLE as error:
            raise NotExchanged(
                f"{ref.key}: cannot be read: {error}; import the checkpoint under another name"
            ) from None
        for path in download.iterdir():
            path.rename(folder / path.name)
        download.rmdir()
        complete(folder)
    return out


def export_directory(directory: Path, out: Path) -> Path:
    """A checkpoint that lies in a directory, in bf16 and with all that loaders look for. Raises NotExchanged."""
    with whole(out) as folder:
        checked = check(directory)
        copy_small(directory, folder)
        normalised(directory, folder, checked)
        complete(folder)
    return out


def _config(objects: Objects, run: str) -> RunConfig:
    try:
        ref = objects.head(f"runs/{run}/config.json")
    except (ObjectMissing, ValueError):  # ValueError: no object can have this name
        imported = f"`{STORED}/{run}` is one" if run in names(objects) else f"which is written {STORED}/NAME"
        raise NotExchanged(
            f"{run}: neither a directory with a config.json, nor a run of this object store, nor an imported checkpoint of it, "
            f"{imported}; ETUDE_STATE or ETUDE_OBJECTS names the store"
        ) from None
    try:
        return msgspec.json.decode(objects.get(ref), type=RunConfig)
    except (ObjectMissing, ValueError) as error:
        raise NotExchanged(
            f"run {run}: {ref.key} of the object store cannot be read: {error}; restore it from a backup of the store"
        ) from None


def _base_files(objects: Objects, base: Ref, folder: Path) -> None:
    """Configuration and tokenizer: training changes neither."""
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            copy_small(download_directory(objects, base, Path(scratch) / "base", weights=False), folder)
    except UNREADABLE as error:
        raise NotExchanged(f"the base {base.key} cannot be read: {error}") from None
