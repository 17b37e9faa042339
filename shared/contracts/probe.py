"""A probe of problems: how often a checkpoint solved some of them before a run begins (`etude tasks probe`). Pure.

{"version": 1, "checkpoint": "policy", "problems": {"m-3f2a": {"attempts": 8, "solved": 3}}}

A run that is given one (`probe` of its configuration) begins with this evidence of how hard its problems are.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import msgspec

from shared.contracts.allowed import shown
from shared.json_once import loads_once

VERSION = 1
MOST_PROBLEMS = 100_000
MOST_ATTEMPTS = 10_000  # at one problem
_NAMED = 5  # objections that an error lists
_WAY_OUT = "allowed: a file that `etude tasks probe --out FILE` wrote"
_TOP, _EACH = ("version", "checkpoint", "problems"), ("attempts", "solved")


class BadProbe(ValueError):
    """The text names each field, what was found and what is allowed."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One problem's attempts that have a verdict, one or more, and how many of them were solved."""

    attempts: int
    solved: int


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """`checkpoint`: a name of what was probed, for people; empty: not said. `problems`: by id, at least one."""

    version: int = VERSION
    checkpoint: str = ""
    problems: dict[str, Tried]


def read(data: bytes) -> Probe:
    """Read a probe. Raises BadProbe."""
    try:
        raw = loads_once(data)
    except (ValueError, RecursionError) as error:
        raise BadProbe(f"not JSON: {error}; {_WAY_OUT}") from None
    if found := list(_objections(raw)):
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise BadProbe("; ".join(found[:_NAMED]) + more)
    return msgspec.convert(raw, Probe)


def require_known(probe: Probe, problems: Container[str], where: str) -> None:
    """Raise BadProbe where the probe names problems that are not among these. `where`: what these are, for the reader."""
    unknown = [name for name in probe.problems if name not in problems]
    if unknown:
        raise BadProbe(
            f"problems: found {shown(unknown[0])}{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}; allowed: ids of "
            f"{where}. A probe fits the pack and the split that it was made of"
        )


def _objections(raw: Any) -> Iterator[str]:
    if not isinstance(raw, dict):
        yield f"found {_plain(raw)}; {_WAY_OUT}"
        return
    if unknown := [name for name in raw if name not in _TOP]:
        yield f"found the field {shown(unknown[0])}; allowed: {', '.join(_TOP)}"
    if not _whole(raw.get("version"), VERSION, VERSION):
        yield f"version: found {_plain(raw.get('version'))}; allowed: {VERSION}"
    if not isinstance(raw.get("checkpoint", ""), str):
        yield f"checkpoint: found {_plain(raw['checkpoint'])}; allowed: a string"
    problems = raw.get("problems")
    if not isinstance(problems, dict) or not 1 <= len(problems) <= MOST_PROBLEMS:
        found = f"{len(problems)} problems" if isinstance(problems, dict) else _plain(problems)
        yield f"problems: found {found}; allowed: an object of 1 to {MOST_PROBLEMS} problems by id"
        return
    for name, one in problems.items():
        yield from _of_problem(f"problems.{name:.200}", one)


def _of_problem(place: str, one: Any) -> Iterator[str]:
    if not isinstance(one, dict) or one.keys() != set(_EACH):
        yield f"{place}: found {_plain(one)}; allowed: an object with {' and '.join(_EACH)}"
    elif not _whole(one["attempts"], 1, MOST_ATTEMPTS):
        yield f"{place}.attempts: found {_plain(one['attempts'])}; allowed: a whole number from 1 to {MOST_ATTEMPTS}"
    elif not _whole(one["solved"], 0, one["attempts"]):
        yield f"{place}.solved: found {_plain(one['solved'])}; allowed: a whole number from 0 to {one['attempts']}, its attempts"


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _plain(value: Any) -> str:
    return "nothing" if value is None else shown(value)
