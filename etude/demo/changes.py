"""A user's changes to what a run learns with: a JSON file of the fields that shall differ (docs/run.md).

{"train": {"learning_rate": 2e-5}, "schedule": {"max_staleness": 4, "pause_on": ["fewer_solved"]}}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.contracts.allowed import unfit
from shared.contracts.run import RunConfig
from shared.json_once import once
from shared.settings import Told

SECTIONS = ("sampling", "reward", "schedule", "train")


class BadChange(Told):
    """Names the file, the field, what was found and what is allowed."""


def read(path: Path) -> dict[str, Any]:
    """Raises BadChange."""
    try:
        found = json.loads(path.read_text(), parse_constant=_finite, parse_float=_finite, object_pairs_hook=once)
    except OSError as error:
        raise BadChange(f"--config {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadChange(f"--config {path}: not JSON ({error})") from None
    if wrong := list(_endless_within(found, "")):
        raise BadChange("\n".join(f"--config {path}: {why}" for why in wrong))
    if not isinstance(found, dict):
        raise BadChange(f"--config {path}: found {type(found).__name__}; allowed: an object with {', '.join(SECTIONS)}")
    return found


@dataclass(frozen=True, slots=True)
class _Endless:
    """A number that is not finite, as the file writes it: JSON readers of other services would refuse it."""

    text: str


def _finite(text: str) -> float | _Endless:
    value = float(text)
    return value if math.isfinite(value) else _Endless(text)


def _endless_within(value: Any, place: str) -> Iterator[str]:
    """Yield field, value and what is allowed, for each number that is not finite."""
    if isinstance(value, _Endless):
        yield f"{place}: found {value.text}; allowed: a finite number".removeprefix(": ")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _endless_within(item, f"{place}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for item in value:
            yield from _endless_within(item, place)


def apply(config: RunConfig, changes: dict[str, Any], source: Path) -> RunConfig:
    """Return the configuration with the changes. Raises BadChange for a name that nothing declares and for a value of another
    type; ranges are the scheduler's to judge (shared.contracts.schedulable)."""
    for name in changes:
        if name not in SECTIONS:
            raise BadChange(f"--config {source}: found {name!r}; allowed: {', '.join(SECTIONS)}")
    if wrong := list(unfit(changes, RunConfig, "")):
        raise BadChange("\n".join(f"--config {source}: {why}" for why in wrong))
    return msgspec.convert(_merged(msgspec.to_builtins(config), changes), RunConfig)


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for name, value in new.items():
        both = isinstance(old.get(name), dict) and isinstance(value, dict)
        result[name] = _merged(old[name], value) if both else value
    return result
