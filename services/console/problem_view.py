"""The public part of a problem of any kind, laid out by the types of its fields. Pure.

No kind is known by name. A field that maps paths to text is shown as files, a list of structures as a table, structures and
everything short as facts. The tests that decide are in the hidden part, which the console never reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from services.console.excerpts import Excerpt, Room
from shared.contracts.run import Ref
from shared.environments import Brief, ToolSpec
from shared.problems.schema import Problem

# Shown elsewhere on the page, or of no use to people.
_ELSEWHERE = ("id", "prompt")
# Table -> a list of texts, one for each of its first rows, and the title of its column.
_COLUMNS = {"visible": ("actual", "the broken code gave")}
MAX_ROWS, MAX_FILES, MAX_LINES = 200, 20, 400
MAX_VALUE = 2000  # characters of a fact


@dataclass(frozen=True, slots=True)
class Table:
    """`name`: such as `3 visible cases`."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    length: int


@dataclass(frozen=True, slots=True)
class File:
    """`left_out`: lines that are not shown."""

    path: str
    lines: tuple[str, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class View:
    """`tools`: that the agent was offered; empty: unknown, or its format has none of its own."""

    prompt: Excerpt | None
    facts: tuple[tuple[str, str], ...]
    files: tuple[File, ...]
    tables: tuple[Table, ...]
    tools: tuple[ToolSpec, ...]


def view(problem: Problem, brief: Brief | None) -> View:
    fields = {name: getattr(problem, name) for name in problem.__struct_fields__ if name not in _ELSEWHERE}
    tables = {name: value for name, value in fields.items() if _is_table(value)}
    beside = {_COLUMNS[name][0] for name in tables if name in _COLUMNS}
    files = [(name, text) for value in fields.values() if _is_files(value) for name, text in value.items()]
    facts = [
        (name.replace("_", " "), _value(value))
        for name, value in fields.items()
        if name not in tables and name not in beside and not _is_files(value) and _says(value)
    ]
    return View(
        prompt=Room().excerpt(problem.prompt, head=30) if problem.prompt else None,
        facts=tuple(facts),
        files=tuple(_file(*file) for file in files[:MAX_FILES]),
        tables=tuple(_table(name, rows, fields) for name, rows in tables.items()),
        tools=brief.tools if brief is not None else (),
    )


def _is_files(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(text, str) for text in value.values())


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, msgspec.Struct) for row in value)


def _says(value: Any) -> bool:
    return value not in ("", None, msgspec.UNSET) and value != [] and value != {}


def _file(path: str, text: str) -> File:
    lines = text.splitlines()
    return File(path, tuple(lines[:MAX_LINES]), max(0, len(lines) - MAX_LINES))


def _table(name: str, rows: list[msgspec.Struct], fields: Mapping[str, Any]) -> Table:
    columns = tuple(name for name in rows[0].__struct_fields__ if any(_given(row, name) for row in rows))
    beside, title = _COLUMNS.get(name, ("", ""))
    more: list[str] = fields.get(beside) or []
    found = []
    for number, row in enumerate(rows[:MAX_ROWS]):
        cells = [_value(getattr(row, column, "")) for column in columns]
        if more:
            cells.append(more[number] if number < len(more) else "")
        found.append(tuple(cells))
    titles = (*columns, title) if more else columns
    kind = f"{type(rows[0]).__name__.lower()}{'' if len(rows) == 1 else 's'}"
    told = f"{len(rows):,} {name.replace('_', ' ')} {kind}"
    return Table(told, tuple(title.replace("_", " ") for title in titles), tuple(found), len(rows))


def _given(row: msgspec.Struct, column: str) -> bool:
    return getattr(row, column, msgspec.UNSET) is not msgspec.UNSET


def _value(value: Any) -> str:
    if value is msgspec.UNSET:
        text = ""
    elif isinstance(value, Ref):
        text = f"{_bytes(value.size)}, {value.key}"
    elif isinstance(value, msgspec.Struct):
        given = {name: getattr(value, name) for name in value.__struct_fields__}
        text = " · ".join(
            f"{name.replace('_', ' ')} {_value(one)}" for name, one in given.items() if one and _says(one)
        )
    elif isinstance(value, str):
        text = value
    elif isinstance(value, list | tuple):
        text = ", ".join(_value(one) for one in value[:100])
    elif isinstance(value, float):
        text = f"{value:g}"
    else:
        text = str(value)
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]}…"


def _bytes(size: int) -> str:
    if size < 1 << 10:
        return f"{size} bytes"
    return f"{size / (1 << 10):,.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):,.1f} MiB"
