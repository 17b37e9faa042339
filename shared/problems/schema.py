"""Problem, JSONL v1: one JSON object a line, of kind `function` unless it says another one (shared.problems.kinds).

The public part (`Problem`) is all that the agent and the rollout worker ever see; the hidden part (`Hidden`) goes to
graders only. A pack is two objects: public lines and hidden lines, joined by id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

if TYPE_CHECKING:
    from shared.problems.kinds import Attach

VERSION = 1
CALL_S = 0.1  # enough for what a small policy repairs; what loops is found out soon
MAX_TIME_S = 600.0  # an attempt waits for it, and a grader
MIN_MEMORY_MB, MAX_MEMORY_MB = 64, 1 << 20  # an interpreter; a TiB
# Characters of a problem's files together. Reading them, Python takes up to a thousand bytes for each.
MAX_CODE = 1 << 18
_SHOWN = 60  # characters of what was found
_MISSING = re.compile(r"Object missing required field `([^`]+)`")  # as msgspec says it
_WRONG_TYPE = re.compile(r"Expected `([^`]+)`, got `[^`]+`")
_TYPES = {
    **{"object": "an object", "array": "a list", "str": "a text", "int": "a whole number", "float": "a number"},
    **{"bool": "true or false", "null": "null"},
}

S = TypeVar("S", bound=msgspec.Struct)


class ProblemError(ValueError):
    """A line that is no problem; the text names the line, the field, what was found and what is allowed."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One test: positional arguments and what the original gave, as tagged JSON texts (shared.problems.values).

    `changed`: True: `expected` is an argument that the call changes in place while it returns None. False: `expected` is
    what the call returns. Left out: either passes, as in packs that were made before cases said it."""

    args: str
    expected: str
    changed: bool | msgspec.UnsetType = msgspec.UNSET  # so that a case without it has the bytes that it had before


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
    """The public part of a problem: all that the agent and the rollout worker ever see. Each kind is a subclass, and
    `shared.environments.registry` maps the kind to it. `cell`: problems of one origin share it and count as relatives;
    empty: the problem has none. `origin`: where the problem comes from, in the words of its kind."""

    id: str
    kind: str
    category: str = "debugging"
    prompt: str = ""
    cell: str = ""
    origin: str = ""
    licence: str = ""

    @property
    def repository(self) -> str:
        """The repository that the problem is of, as its origin or its cell names it. Empty: it is of none."""
        return ""

    @property
    def task(self) -> str:
        """All that the agent is told to do, for behaviour terms and a judge. Empty: what it is told at the beginning is all."""
        return ""

    def levels(self, hidden: Any) -> list[str]:
        """Return the problem's levels of hardness, each as a tag such as "language-python": problems that share one are
        alike in it. Empty: the kind has none. `hidden`: the problem's hidden part."""
        return []


class Hidden(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden part of a problem. Only graders and the curator read it. Each kind is a subclass, which gives `kind` its name
    as the default; kind `function` alone leaves it unset, for the bytes that it had before there were others."""

    id: str
    kind: str | msgspec.UnsetType = msgspec.UNSET


def too_long(files: Mapping[str, str]) -> str | None:
    """Return why files are too long to be read as Python: found and allowed; None: they are not. Ask it before any parser."""
    if (found := sum(map(len, files.values()))) > MAX_CODE:
        return f"found {found:,} characters of code; allowed: at most {MAX_CODE:,}"
    return None


class FunctionProblem(Problem, frozen=True, kw_only=True):
    """One Python function to repair. `files`: path -> text, the broken state. `entry`: the function under test,
    `path::name`, or `name` where there is one file. `actual`: what the broken code returns for each visible case (tagged
    JSON, or the name of an exception); it saves the agent a first test run. `origin`: distribution:module:qualname.
    `image` and `base_commit` mean nothing for this kind; lines of version 1 may carry them."""

    kind: Literal["function"] = "function"
    files: dict[str, str]
    entry: str
    visible: list[Case]
    actual: list[str] = []
    limits: Limits = Limits()
    image: str = ""
    base_commit: str = ""


class FunctionHidden(Hidden, frozen=True, kw_only=True):
    """`solution`: path -> text, the original, for the oracle check and for SFT traces. `bug`: the kind of mutation, for
    reports."""

    cases: list[Case]
    solution: dict[str, str] = {}
    bug: str = ""


class _Own(FunctionProblem, frozen=True, kw_only=True):
    """A line of a user's file: both parts in one."""

    hidden: list[Case] = []
    solution: dict[str, str] = {}
    bug: str = ""


def parse_line(line: str, number: int, attach: Callable[[], Attach] | None = None) -> tuple[Problem, Hidden]:
    """One line of a user's JSONL file, with the hidden part inside it. `attach` gives what stores the trees that the line
    names; None: a line that names one is refused. Raises ProblemError naming the line and the field."""
    try:
        return _parsed(_object(line), attach)
    except ValueError as error:
        raise ProblemError(f"line {number}: {error}") from None


def _object(line: str) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(line)
        json.loads(line, object_pairs_hook=_once, parse_int=str)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    except _Twice as error:
        raise ValueError(f"field {str(error)[:_SHOWN]!r} stands twice in one object; allowed: once") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply to be read") from None
    if not isinstance(raw, dict):
        raise ValueError(f"found {_short(raw)}; allowed: one JSON object a line")
    if (version := raw.pop("version", VERSION)) != VERSION or type(version) is not int:
        raise ValueError(f"field 'version': found {_short(version)}; allowed: {VERSION}, or left out")
    return raw


def _parsed(raw: dict[str, Any], attach: Callable[[], Attach] | None) -> tuple[Problem, Hidden]:
    kind = raw.get("kind", "function")
    if kind != "function":
        from shared.problems import kinds

        return kinds.parse(raw, attach)
    if unknown := _unknown(raw):
        raise ValueError(unknown)
    own = converted(raw, _Own)
    if not own.hidden:
        raise ValueError("field 'hidden' is empty; a function problem needs at least one hidden case")
    problem = FunctionProblem(**{name: getattr(own, name) for name in FunctionProblem.__struct_fields__})
    return problem, FunctionHidden(id=own.id, cases=own.hidden, solution=own.solution, bug=own.bug)


def converted(raw: Any, kind: type[S], before: str = "") -> S:
    """Return the object as the struct. Raises ValueError naming the field, with `before` before its name."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ValueError(_located(raw, str(error), before)) from None


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
    return next(
        filter(None, (unknown_field(found, kind.__struct_fields__, place) for place, found, kind in places)), ""
    )


def unknown_field(found: Any, known: Sequence[str], place: str = "") -> str:
    """Name the first field of an object that nobody reads, and which one was meant; empty where all are known."""
    for name in found if isinstance(found, dict) else ():
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"did you mean {place + near[0]!r}?" if near else f"allowed: {', '.join(known)}"
            return f"field {(place + name)[:_SHOWN]!r}: not known; {meant} (docs/problems.md)"
    return ""


def _located(raw: Any, message: str, before: str = "") -> str:
    """Reword what msgspec says (`Expected … - at `$.hidden[0].args``): name the field, what stands there, and what is allowed."""
    what, _, path = message.partition(" - at `$")
    found: Any = raw
    for name, index in re.findall(r"\.([^.\[`]+)|\[(\d+)\]", path.partition("[...]")[0]):
        found = found[name] if name else found[int(index)]
    field = path.rstrip("`").removeprefix(".")
    if missing := _MISSING.fullmatch(what):
        return f"field {before + (f'{field}.' if field else '') + missing[1]!r}: is missing"
    if wrong := _WRONG_TYPE.fullmatch(what):
        types = (_TYPES.get(name, name) for name in wrong[1].split(" | "))
        what = f"allowed: {' or '.join(types)}"
        return f"field {before + field!r}: found {_short(found)}; {what}" if field else f"found {_short(found)}; {what}"
    if field:
        return f"field {before + field!r}: found {_short(found)}: {what}"
    return f"field {before.rstrip('.')!r}: {what}" if before else what


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
