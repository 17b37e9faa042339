"""Tool calls in the form of Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Pure, never raises.

Invariants: the parts of a text, joined, are the text; what is not exactly that form is text, whatever it was meant to be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments`: a JSON object, as the model wrote it. `source`: the call as it stood in the text, with the white space
    around it, which a template writes by itself."""

    name: str
    arguments: str
    source: str


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


_SPACE = re.compile(r"\s*")
# Objects become tuples of pairs: none is taken for an array, and a key that stands there twice is seen.
_DECODER = json.JSONDecoder(object_pairs_hook=tuple)


def parse(text: str) -> list[str | Call]:
    """The parts of a text, in order."""
    parts: list[str | Call] = []
    done = at = 0  # before `done` every character is in a part; before `at` no further call begins
    while (start := text.find(OPEN, at)) >= 0:
        at = start + len(OPEN)
        found = _read(text, at)
        if found is None:
            continue
        name, arguments, end = found
        begin = done + len(text[done:start].rstrip())
        end = _past_space(text, end)
        if begin > done:
            parts.append(text[done:begin])
        parts.append(Call(name, arguments, text[begin:end]))
        done = at = end
    if done < len(text):
        parts.append(text[done:])
    return parts


def content_of(parts: Sequence[str | Call]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def settled(text: str) -> int:
    """How many characters are content whatever comes after them: none from where a call may have begun."""
    start = text.find(OPEN)
    return len(text[: start if start >= 0 else len(text) - begun(text, [OPEN])].rstrip())


def begun(text: str, wanted: Sequence[str]) -> int:
    """Characters at the end of the text that one of `wanted` may begin with."""
    for n in range(min(len(text), max(map(len, wanted), default=0)), 0, -1):
        if any(len(w) > n and text.endswith(w[:n]) for w in wanted):
            return n
    return 0


def _read(text: str, at: int) -> tuple[str, str, int] | None:
    """(name, arguments, end) of the call whose opening tag ends at `at`; None: there is none. The object is read as JSON, not
    searched for its end: a string within it may hold a closing tag."""
    at = _past_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, at)
        close = _past_space(text, end)
        if not text.startswith(CLOSE, close) or not _is_call(value):
            return None
        written = msgspec.json.decode(text[at:end].encode(), type=_Written)
        arguments = bytes(written.arguments)
        msgspec.json.decode(arguments)  # what Python's reader lets pass, NaN for one, no client could read
    except (ValueError, msgspec.DecodeError, RecursionError):
        return None
    return written.name, arguments.decode(), close + len(CLOSE)


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _is_call(value: Any) -> bool:
    if type(value) is not tuple or sorted(key for key, _ in value) != ["arguments", "name"]:
        return False
    fields = dict(value)
    return bool(fields["name"]) and type(fields["name"]) is str and type(fields["arguments"]) is tuple
