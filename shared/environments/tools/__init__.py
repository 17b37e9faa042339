"""Tools of agents: one module each, found by the tool's name and loaded on first use.

A tool is a class `Tool` in its module, without state: what belongs to one attempt lies in the `Toolbox`, which the
environment makes. To add a tool, write `shared/environments/tools/NAME.py` and a test. Other packages add theirs by an
entry point of the group `etude.tools`: its name is the tool's, its object a class that is called without arguments.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Protocol

from shared.environments import Result, ToolSpec
from shared.plugins import Plugins, Unloadable, modules_of

MAX_TEXT = 4 << 20  # bytes of a file that a tool reads or edits


class ToolError(Exception):
    """The call cannot be executed as it is written, and changed nothing; the text says why and what would be valid."""


class FileAccess(Protocol):
    """The files of the attempt. Paths are absolute, as the sandbox sees them."""

    async def read(self, path: str, cap: int) -> tuple[bytes, bool]: ...

    async def write(self, path: str, data: bytes) -> bool: ...

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Do an operation by name, such as `list` or `grep`. Raises ToolError."""

    async def close(self) -> None: ...


class ShellOutput(Protocol):
    @property
    def output(self) -> bytes: ...

    @property
    def exit_code(self) -> int | None: ...

    @property
    def ended(self) -> bool:
        """Whether the session is over, with its variables and processes."""

    @property
    def cause(self) -> str:
        """Say why the command ended, as shared.sandbox.contract.Cause does."""


class ShellAccess(Protocol):
    @property
    def folder(self) -> str: ...

    def renew(self, folder: str) -> None: ...

    async def run(self, command: str, time_s: float) -> ShellOutput: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A piece of a file that a search found: lines [first, last], counted from 1."""

    path: str
    first: int
    last: int


@dataclass(slots=True)
class Toolbox:
    """The means that an environment lends its tools for one attempt.

    `folder`: where relative paths begin. `command_s`: time limit of one command. `search`: finds pieces of the tree as it
    was given; None: there is no index. `unsubmittable`: says why the work cannot be submitted as it is, or None.
    """

    files: FileAccess
    shell: ShellAccess
    folder: str
    command_s: float
    notes: dict[str, str] = field(default_factory=dict)
    search: Callable[[str, int], Awaitable[Sequence[Hit]]] | None = None
    unsubmittable: Callable[[], Awaitable[str | None]] | None = None

    def path(self, path: str) -> str:
        """Return a path as the sandbox sees it. Raises ToolError."""
        if "\0" in path:
            raise ToolError("argument 'path': found a NUL character; allowed: none")
        return str(PurePosixPath(self.folder) / path)

    def shown(self, path: str) -> str:
        """Return a path as the agent writes it."""
        return path.removeprefix(f"{self.folder}/")


class Tool(Protocol):
    spec: ToolSpec

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str | Result:
        """Execute a call whose arguments fit the schema. Return its answer as text, or a result whose `call` and `tool` the
        caller fills in. Raises ToolError, InfrastructureError."""


# Every module here is a tool of the module's name; one underscore behind it keeps a name of Python's own free (`list_`).
PLUGINS = Plugins(
    "etude.tools", {name.removesuffix("_"): value for name, value in modules_of(sys.modules[__name__], "Tool").items()}
)


@functools.cache
def names() -> list[str]:
    """Return the names of all tools that can be loaded here, without loading any."""
    return PLUGINS.names()


@functools.cache
def load(name: str) -> Tool:
    """Return the tool of that name. Raises shared.plugins.UnknownName, shared.plugins.Unloadable."""
    made = PLUGINS.load(name)
    try:
        tool: Tool = made()
        named = tool.spec.name
    except Exception as error:  # whatever another package brings
        raise Unloadable(f"{PLUGINS.place(name)} cannot be made: {type(error).__name__}: {error}") from error
    if named != name:
        raise Unloadable(f"{PLUGINS.place(name)}: its spec says {named!r:.80}; allowed: the name of its entry point")
    return tool


def objection(wanted: Sequence[str]) -> str | None:
    """Return which tool cannot be offered and why, or None."""
    for name in wanted:
        if name not in names():
            return f"found {name!r:.60}; allowed: {', '.join(names())}"
        try:
            load(name)
        except Unloadable as error:
            return f"found {name!r:.60}: {error}"
    return None


def parameters(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON schema of an object. A value is a type's name, or a whole schema."""
    properties = {
        name: {"type": schema} if isinstance(schema, str) else schema
        for name, schema in {**required, **(optional or {})}.items()
    }
    return {"type": "object", "properties": properties, "required": list(required)}


async def text_of(box: Toolbox, path: str) -> str:
    """Return the text of a file. Raises ToolError."""
    data, whole = await box.files.read(box.path(path), MAX_TEXT)
    if not whole:
        raise ToolError(f"{path}: larger than {MAX_TEXT >> 20} MiB; use grep or shell")
    if b"\0" in data[:8192]:
        raise ToolError(f"{path}: a binary file; allowed: text")
    return data.decode("utf-8", "surrogateescape")


def numbered(lines: Sequence[str], first: int) -> str:
    """Return lines with their numbers in front, the first being `first`."""
    return "\n".join(f"{number:>6}\t{line}" for number, line in enumerate(lines, first))


def lines_of(text: str) -> list[str]:
    """Split at newlines alone: form feeds and the like are characters of a line, as editors and compilers see it."""
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines
