"""Tool calls on a function, and what they give: the terms of `compact-1` and of the recipe of the base policy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tool(StrEnum):
    edit = "edit"
    undo = "undo"
    test = "test"
    submit = "submit"
    summary = "summary"


@dataclass(frozen=True, slots=True)
class Action:
    """One tool call, read from sampled tokens [start, end) of a completion. `error`: why it is broken, else empty."""

    tool: Tool
    start: int
    end: int
    line: int = 0  # edit: zero-based line of the file
    old: str = ""  # edit: text to replace, its first occurrence in the line
    new: str = ""
    text: str = ""  # summary
    error: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """A tool's answer. `failing`: index of the first failing visible test, None if all pass."""

    tool: Tool
    failing: int | None = None
    got: str = ""
    error: str = ""
