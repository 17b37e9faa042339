"""The arguments of a tool call for people: short ones in a line, long ones as blocks, what replaces what as a difference. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.console import changes
from services.console.excerpts import Excerpt, Room

# Names that tools give a text and what replaces it. By the names of arguments, as no page knows a tool.
REPLACED = (
    ("old", "new"),
    ("old_string", "new_string"),
    ("old_str", "new_str"),
    ("old_text", "new_text"),
    ("search", "replace"),
    ("before", "after"),
)
SHORT = 120  # characters of a value that stands in the line of its call
MOST = 40  # arguments that are shown


@dataclass(frozen=True, slots=True)
class Argument:
    """`value`: in the line of the call. Else `old` and `new`: a short text and what replaces it; `lines`: a difference; `text`:
    a block of its own."""

    name: str
    value: str = ""
    old: str | None = None
    new: str = ""
    lines: tuple[changes.Line, ...] = ()
    left_out: int = 0
    text: Excerpt | None = None


def arguments(given: Mapping[str, Any], room: Room) -> tuple[Argument, ...]:
    """Return the arguments of a call, those with short values first, each part in the call's order."""
    if not isinstance(given, Mapping):
        return (_one("arguments", given, room),)
    found = list(_all(given, room))
    shown = found[:MOST]
    if len(found) > MOST:
        shown.append(Argument(f"{len(found) - MOST} more arguments"))
    return tuple(sorted(shown, key=lambda argument: argument.text is not None or bool(argument.lines)))


def _all(given: Mapping[str, Any], room: Room) -> Iterator[Argument]:
    rest = dict(given)
    for old, new in REPLACED:
        if isinstance(rest.get(old), str) and isinstance(rest.get(new), str):
            replaced = _replaced(rest.pop(old), rest.pop(new), room)
            yield from (_one(str(name), value, room) for name, value in rest.items())
            yield replaced
            return
    yield from (_one(str(name), value, room) for name, value in rest.items())


def _replaced(old: str, new: str, room: Room) -> Argument:
    if len(old) + len(new) <= SHORT and "\n" not in old + new:
        return Argument("", old=room.take(old), new=room.take(new))
    lines = changes.compared(room.take(old), room.take(new), changes.Effort(steps=1_000_000))
    lines = [line for line in lines if line[0] != "hunk"] if len(lines) < changes.MAX_LINES else lines
    shown = tuple(lines[: changes.MAX_LINES])
    return Argument("", lines=shown, left_out=len(lines) - len(shown))


def _one(name: str, value: Any, room: Room) -> Argument:
    text = value if isinstance(value, str) else _json(value)
    if len(text) <= SHORT and "\n" not in text:
        return Argument(name, value=room.take(text))
    if isinstance(value, str) and changes.looks_like_a_patch(value):
        lines = changes.patch_lines(room.take(value))
        return Argument(name, lines=tuple(lines[: changes.MAX_LINES]), left_out=max(0, len(lines) - changes.MAX_LINES))
    return Argument(name, text=room.excerpt(text))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
