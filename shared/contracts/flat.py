"""A run's configuration as names and values: for trackers of experiments, and to tell two apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """`{"train": {"kl": 0.1}}` → `{"train.kl": 0.1}`. Of a reference its key; lists as JSON; what is none is left out."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            if value.keys() == {"key", "size", "checksum"}:
                found[f"{prefix}{name}"] = value["key"]
            else:
                found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float | bool):
            found[f"{prefix}{name}"] = value
        elif value is not None:
            found[f"{prefix}{name}"] = json.dumps(value)
    return found
