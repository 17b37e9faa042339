"""Ranges and names that a field of a run's configuration allows. They are declared at the field (shared.contracts.run).

Only front doors check them: `etude start`, `etude reconfigure` and the scheduler, before it takes a configuration up. Codecs pass
over them, so a stored run or a message stays readable when a range becomes narrower. Pure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

EXACT = 2**53  # JSON readers keep whole numbers exact up to here
SHOWN = 80  # characters of a value that an objection repeats


@dataclass(frozen=True, slots=True)
class Number:
    """Allows finite numbers from `least` to `most`, both included, or above `above` and below `below`. None: no such bound.
    `zero`: what 0 means, for the reader. Of a list, each item."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    zero: str = ""

    def admits(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and value <= self._highest(value)
        )

    def objections(self, place: str, value: Any) -> Iterator[str]:
        for item in value if isinstance(value, list | tuple) else (value,):
            if not self.admits(item):
                unsaid = f", at most {EXACT}" if self.most is None and item > self._highest(item) else ""
                yield f"{place}: found {shown(item)}; allowed: {self}{unsaid}"

    def _highest(self, value: float) -> float:
        """Whole numbers end somewhere, for no store of ours takes them beyond 64 bits."""
        if self.most is not None:
            return self.most
        return EXACT if isinstance(value, int) else math.inf

    def __str__(self) -> str:
        zero = f"0 ({self.zero})" if self.zero else "0"
        least = None if self.least is None else zero if self.least == 0 else _plain(self.least)
        if least and self.most is not None:
            return f"{least} to {_plain(self.most)}"
        low = f"{least} or more" if least else "" if self.above is None else f"more than {_plain(self.above)}"
        high = "" if self.most is None else f"at most {_plain(self.most)}"
        return ", ".join(filter(None, (low, high, "" if self.below is None else f"less than {_plain(self.below)}")))


@dataclass(frozen=True, slots=True)
class Names:
    """Allows a list of these names, or an object that gives some of them a number that `each` allows. `names`: or a function that
    returns them, for names that depend on what is installed. `hint`: how another name could come to be allowed."""

    names: tuple[str, ...] | Callable[[], tuple[str, ...]]
    each: Number | None = None
    hint: str = ""

    @property
    def known(self) -> tuple[str, ...]:
        return self.names if isinstance(self.names, tuple) else self.names()

    def objections(self, place: str, value: Any) -> Iterator[str]:
        known = self.known  # a function may look through all installed packages
        for name in value:
            if name not in known:
                found = f"found {shown(f'{place}.{name}')}" if self.each else f"{place}: found {shown(name)}"
                yield f"{found}; allowed: {', '.join(known)}" + (f"; {self.hint}" if self.hint else "")
            elif self.each:
                yield from self.each.objections(f"{place}.{name}", value[name])

    def __str__(self) -> str:
        return ", ".join(self.known) + (f"; each {self.each}" if self.each else "")


@dataclass(frozen=True, slots=True)
class Length:
    """Allows a string of 1 to `most` characters. `reason`: why, for the reader."""

    most: int
    reason: str = ""

    def objections(self, place: str, value: Any) -> Iterator[str]:
        if not 1 <= len(value) <= self.most:
            yield f"{place}: found {len(value)} characters; allowed: {self}"

    def __str__(self) -> str:
        return f"1 to {self.most} characters" + (f", {self.reason}" if self.reason else "")


def declared(hint: Any) -> list[Number | Names | Length]:
    """Return the rules of a field's type, as `get_type_hints(…, include_extras=True)` gives it."""
    return [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Number | Names | Length)]


def objections(struct: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """Yield field, value and what is allowed, for each field outside of its declaration."""
    for name, hint in get_type_hints(type(struct), include_extras=True).items():
        value, place = getattr(struct, name), f"{prefix}{name}"
        for rule in declared(hint):
            yield from rule.objections(place, value)
        if isinstance(value, msgspec.Struct):
            yield from objections(value, f"{place}.")


def unfit(value: Any, hint: Any, place: str) -> Iterator[str]:
    """Yield the same for each part of a JSON value that is not of the type `hint`, and for each name that nothing declares."""
    rules, hint = declared(hint), _bare(hint)
    struct = _struct(hint)
    if struct and isinstance(value, dict):
        hints = get_type_hints(struct, include_extras=True)
        for name, item in value.items():
            where = f"{place}.{name}".lstrip(".")
            if name in hints:
                yield from unfit(item, hints[name], where)
            else:
                yield f"found {shown(where)}; allowed: {', '.join(sorted(hints))}"
    elif get_origin(hint) is dict and isinstance(value, dict) and not _fits(value, hint):
        for name, item in value.items():
            yield from unfit(item, get_args(hint)[1], f"{place}.{name}")
    elif not _fits(value, hint):
        yield f"{place}: found {shown(value)}; allowed: {kind(hint)}"
    else:
        for rule in rules:
            if isinstance(rule, Names):
                yield from rule.objections(place, value)


def _fits(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def kind(hint: Any) -> str:
    """Return what a type allows, in the words of JSON. Other types than a run's configuration has are named as they are."""
    hint = _bare(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin in (Union, UnionType):
        return " or ".join("null" if part is type(None) else kind(part) for part in parts)
    if origin is tuple:
        return f"a list of {len(parts)} numbers"
    if struct := _struct(hint):
        return f"an object with {', '.join(struct.__struct_fields__)}"
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    many = {list: "a list of strings", dict: "an object of numbers by name"}
    return plain.get(hint) or many.get(origin) or f"a value of type {getattr(hint, '__name__', hint)}"


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _struct(hint: Any) -> type[msgspec.Struct] | None:
    """The structure that a type is, or may be where it allows null besides."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def shown(value: Any) -> str:
    """A value as an objection repeats it: strings in quotes, numbers as they are, null, true and objects as JSON."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    text = repr(value) if plain else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else f"{bound:g}"
