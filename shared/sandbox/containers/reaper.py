"""Removes from an engine what dead processes left there, and caches that have expired."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from shared.sandbox.containers import labels
from shared.sandbox.containers.engine import Engine, in_use, missing, spoken_for


def reap(engine: Engine) -> int:
    """Remove containers, bases and volumes whose owner is dead or whose deadline has passed; what is in use stays. Return how
    many sandboxes that were. Raises SandboxUnavailable."""
    now, sandboxes, api = time.time(), 0, engine.api
    only_ours = {"label": labels.KIND}
    with spoken_for("removing what dead workers left"):
        for found in api.containers(all=True, filters=only_ours):
            marks = found.get("Labels") or {}
            # A container has its image's labels, too: one of another kind was started by a person from one of our bases.
            if marks.get(labels.KIND) in ("sandbox", "helper") and labels.expired(marks, now):
                gone = _gone(partial(api.remove_container, found["Id"], force=True, v=True))
                sandboxes += gone and marks[labels.KIND] == "sandbox"
        for found in api.images(filters=only_ours):
            if labels.expired(found.get("Labels") or {}, now):
                _gone(partial(api.remove_image, found["Id"]))
        for found in api.volumes(filters=only_ours)["Volumes"] or []:
            if labels.expired(found.get("Labels") or {}, now):
                _gone(partial(api.remove_volume, found["Name"]))
    return sandboxes


def _gone(remove: Callable[[], Any]) -> bool:
    """Return whether this call removed the thing, and not another worker's."""
    from docker.errors import APIError

    try:
        remove()
    except APIError as error:
        if not missing(error) and not in_use(error):
            raise
        return False
    return True
