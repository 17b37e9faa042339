"""JSON written by people, in which a name may stand only once."""

from __future__ import annotations

import json
from typing import Any


def loads_once(data: bytes | str) -> Any:
    """Read JSON. Raises ValueError for what is no JSON, and for a name that stands twice in one object: json would take the last
    value without a word."""
    return json.loads(data, object_pairs_hook=once)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object, as a hook of `json.loads`. Raises ValueError naming the one that stands twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is named twice in one object")
        found[name] = value
    return found
