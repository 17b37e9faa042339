"""Problem, JSONL v1: one JSON object a line.

The public part (`Problem`) is all that the agent and the rollout worker ever see; the hidden part (`Hidden`) goes to
graders only. A pack is two objects: public lines and hidden lines, joined by id.
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import Any, Literal

import msgspec

VERSION = 1
CALL_S = 0.1  # enough for what a small policy repairs; what loops is found out soon
MAX_TIME_S = 600.0  # an attempt waits for it, and a grader
MIN_MEMORY_MB, MAX_MEMORY_MB = 64, 1 << 20  # an interpreter; a TiB
_SHOWN = 60  # characters of what was found


class ProblemError(ValueError):
    """A line that is no problem; the text names the line, the field, what was found and what is allowed."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test: positional arguments and what the original returned, as tagged JSON texts (shared.problems.values)."""

    args: str
    expected: str


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """`time_s`: processor time of all cases of one run together; `call_s`: of one case, left out: `CALL_S`."""

    time_s: float = 2.0
    memory_mb: int = 512
    call_s: float | msgspec.UnsetType = msgspec.UNSET  # so that a problem without it has the bytes that it had before

    @property
    def of_a_call(self) -> float:
        return CALL_S if isinstance(self.call_s, msgspec.UnsetType) else self.call_s

    def objection(self) -> str:
        """What a sandbox cannot take: found and allowed; empty where there is nothing."""
        if not 0 < self.time_s <= MAX_TIME_S:
            return f"found time_s {self.time_s:g}; allowed: above 0, at most {MAX_TIME_S:g}"
        if not MIN_MEMORY_MB <= self.memory_mb <= MAX_MEMORY_MB:
            return f"found memory_mb {self.memory_mb}; allowed: {MIN_MEMORY_MB} to {MAX_MEMORY_MB}"
        if not isinstance(self.call_s, msgspec.UnsetType) and not 0 < self.call_s <= self.time_s:
            return f"found call_s {self.call_s:g}; allowed: above 0, at most time_s ({self.time_s:g})"
        return ""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The public part. `files`: path -> text, the broken state. `entry`: the function under test, `path::name` or `name`
    when there is one file. `actual`: what the broken code returns for each visible case (tagged JSON, or an exception's
    name); it saves the agent a first test run. `cell`: relatives (problems of one origin function)."""

    id: str
    kind: Literal["function", "repository"] = "function"
    category: str = "debugging"
    prompt: str = ""
    files: dict[str, str]
    entry: str
    visible: list[Case]
    actual: list[str] = []
    limits: Limits = Limits()
    cell: str = ""
    origin: str = ""  # distribution:module:qualname
    licence: str = ""
    image: str = ""  # repository problems
    base_commit: str = ""


class Hidden(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden part. `solution`: path -> text, the original, for the oracle check and for SFT traces; it never leaves
    the curator and the graders. `bug`: what was broken (kind of mutation), for reports."""

    id: str
    cases: list[Case]
    solution: dict[str, str] = {}
    bug: str = ""


class _Own(Problem, frozen=True, kw_only=True):
    """A line of a user's file: both parts in one."""

    hidden: list[Case] = []
    solution: dict[str, str] = {}
    bug: str = ""


def parse_line(line: str, number: int) -> tuple[Problem, Hidden]:
    """One line of a user's JSONL file, with `hidden` inside it. Raises ProblemError naming the line and the field."""

    def refuse(what: str) -> ProblemError:
        return ProblemError(f"line {number}: {what}")

    try:
        raw = msgspec.json.decode(line)
        json.loads(line, object_pairs_hook=_once, parse_int=str)
    except msgspec.DecodeError as error:
        raise refuse(str(error)) from None
    except _Twice as error:
        raise refuse(f"field {str(error)[:_SHOWN]!r} stands twice in one object; allowed: once") from None
    except RecursionError:
        raise refuse("the JSON is nested too deeply to be read") from None
    if not isinstance(raw, dict):
        raise refuse(f"found {_short(raw)}; allowed: one JSON object a line")
    if (version := raw.pop("version", VERSION)) != VERSION or type(version) is not int:
        raise refuse(f"field 'version': found {_short(version)}; allowed: {VERSION}, or left out")
    if unknown := _unknown(raw):
        raise refuse(unknown)
    try:
        own = msgspec.convert(raw, _Own)
    except msgspec.ValidationError as error:
        raise refuse(_located(raw, str(error))) from None
    if own.kind == "function" and not own.hidden:
        raise refuse("field 'hidden' is empty; a function problem needs at least one hidden case")
    problem = Problem(**{name: getattr(own, name) for name in Problem.__struct_fields__})
    return problem, Hidden(id=own.id, cases=own.hidden, solution=own.solution, bug=own.bug)


class _Twice(Exception):
    """A name that an object gives to two values: which one is meant, nobody knows."""


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _Twice(name)
        seen.add(name)


def _unknown(raw: dict[str, Any]) -> str:
    """The first field that nobody reads, and which one was meant; empty where all are known."""
    places: list[tuple[str, Any, type[msgspec.Struct]]] = [("", raw, _Own), ("limits.", raw.get("limits"), Limits)]
    for field in ("visible", "hidden"):
        cases = raw.get(field)
        if isinstance(cases, list):
            places += [(f"{field}[{index}].", case, Case) for index, case in enumerate(cases)]
    for place, found, kind in places:
        for name in found if isinstance(found, dict) else ():
            if name not in kind.__struct_fields__:
                near = get_close_matches(name, kind.__struct_fields__, 1)
                meant = (
                    f"did you mean {place + near[0]!r}?" if near else f"allowed: {', '.join(kind.__struct_fields__)}"
                )
                return f"field {(place + name)[:_SHOWN]!r}: not known; {meant} (docs/problems.md)"
    return ""


def _located(raw: dict[str, Any], message: str) -> str:
    """What msgspec says (`Expected … - at `$.hidden[0].args``), with the field by its name in the file and what stands there."""
    what, _, path = message.partition(" - at `$")
    found: Any = raw
    for name, index in re.findall(r"\.([^.\[`]+)|\[(\d+)\]", path.partition("[...]")[0]):
        found = found[name] if name else found[int(index)]
    field = path.rstrip("`").removeprefix(".")
    return f"field {field!r}: found {_short(found)}: {what}" if field else what


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
