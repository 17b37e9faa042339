"""Imported checkpoints in the object store, by name. A name is never given to other weights."""

from __future__ import annotations

import re
from pathlib import Path

from etude.exchange.errors import NotExchanged
from shared.contracts.run import Ref
from shared.objects import ObjectMissing, Objects
from shared.weights.checkpoint_objects import MANIFEST, checksums_of, read_checkpoint, upload_once

STORED = "checkpoints"  # where imported ones lie in the object store
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def stored(objects: Objects, name: str) -> Ref:
    """The imported checkpoint of this name. Raises NotExchanged naming those that there are."""
    name = name.removeprefix(f"{STORED}/")
    try:
        if NAME.fullmatch(name):
            return objects.head(f"{STORED}/{name}/{MANIFEST}")
    except ObjectMissing:
        pass
    there = ", ".join(names(objects)) or "none"
    raise NotExchanged(f"{STORED}/{name}: no such checkpoint; there are: {there}. `etude import DIR` adds one")


def store(objects: Objects, name: str, folder: Path) -> tuple[Ref, bool]:
    """Store the checkpoint under its name and return (reference, stored just now?). Raises NotExchanged if the name holds
    another checkpoint."""
    key = f"{STORED}/{name}"
    try:
        there = objects.head(f"{key}/{MANIFEST}")
    except ObjectMissing:
        if ref := upload_once(objects, key, folder):
            return ref, True
        there = objects.head(f"{key}/{MANIFEST}")  # another import was first
    known = {path: file.checksum for path, file in read_checkpoint(objects, there).files.items()}
    if known != checksums_of(folder):
        raise NotExchanged(f"{key} holds another checkpoint, which runs may have started from; give another --name")
    return there, False


def names(objects: Objects) -> list[str]:
    return sorted({key.split("/")[1] for key in objects.list(f"{STORED}/") if key.endswith(f"/{MANIFEST}")})
