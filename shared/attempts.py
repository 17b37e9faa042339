"""Where an attempt's outcome lies in the object store."""

from __future__ import annotations

from shared.contracts.ids import attempt_prefix
from shared.contracts.run import Ref
from shared.objects import Objects


def newest_trajectory(objects: Objects, run: str, attempt: str) -> Ref | None:
    """Return what the newest epoch of an attempt has stored, or None where it has stored nothing."""
    prefix = attempt_prefix(run, attempt, 0).rsplit("/", 1)[0] + "/"
    keys = [key for key in objects.list(prefix) if key.rsplit("/", 1)[1].startswith("trajectory")]
    epochs = {int(key[len(prefix) :].split("/", 1)[0]): key for key in keys}
    return objects.head(epochs[max(epochs)]) if epochs else None
