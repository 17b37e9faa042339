"""A user's changes to what a run learns with: a JSON file of the fields that shall differ (docs/run.md).

{"train": {"learning_rate": 2e-5}, "schedule": {"max_staleness": 4, "pause_on": ["fewer_solved"]}}
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.run import BEHAVIOUR, RunConfig
from shared.settings import Told

SECTIONS = ("sampling", "reward", "schedule", "train")
FREE = ("reward.behaviour", "reward.length.token_weights", "train.credit.faults")  # names of their own, not fields


class BadChange(Told):
    """Names the file, the field, what was found and what is allowed."""


def read(path: Path) -> dict[str, Any]:
    """Raises BadChange."""
    try:
        found = json.loads(path.read_text(), parse_constant=_finite, parse_float=_finite)
    except OSError as error:
        raise BadChange(f"--config {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadChange(f"--config {path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise BadChange(f"--config {path}: found {type(found).__name__}; allowed: an object with {', '.join(SECTIONS)}")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"found {text}; allowed: a finite number")
    return value


def apply(config: RunConfig, changes: dict[str, Any], source: Path) -> RunConfig:
    """Raises BadChange."""
    plain = msgspec.to_builtins(config)
    for name in changes:
        if name not in SECTIONS:
            raise BadChange(f"--config {source}: found {name!r}; allowed: {', '.join(SECTIONS)}")
    try:
        changed = msgspec.convert(_merged(plain, changes, "", source), RunConfig)
    except msgspec.ValidationError as error:
        raise BadChange(f"--config {source}: {error}") from None
    for name in changed.reward.behaviour:
        if name not in BEHAVIOUR:
            raise BadChange(f"--config {source}: found 'reward.behaviour.{name}'; allowed: {', '.join(BEHAVIOUR)}")
    return changed


def _merged(old: dict[str, Any], new: dict[str, Any], place: str, source: Path) -> dict[str, Any]:
    result = dict(old)
    for name, value in new.items():
        where = f"{place}.{name}".lstrip(".")
        if name not in old and place not in FREE:
            raise BadChange(f"--config {source}: found {where!r}; allowed: {', '.join(sorted(old))}")
        both = isinstance(old.get(name), dict) and isinstance(value, dict)
        result[name] = _merged(old[name], value, where, source) if both else value
    return result
