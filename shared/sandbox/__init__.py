"""Sandboxes: candidate code is hostile. It never runs outside one, never sees the network, credentials or the grader.

`Functions` runs one function on many inputs (problems of kind `function`); expected outputs never enter the sandbox:
the caller compares. `connect` gives one. `Sandboxes` starts a machine-like sandbox for commands (problems of kind
`repository`); `connect_commands` gives one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shared.sandbox.pool import FunctionPool


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate code; the text says what is missing and how to get it. Infrastructure, never a reward."""


@dataclass(frozen=True, slots=True)
class Limits:
    time_s: float = 2.0  # wall clock for all calls of one run
    cpu_s: float = 0.0  # processor time of one run, in whole seconds rounded up; 0: as time_s
    call_s: float = 0.1  # processor time for one call
    memory_mb: int = 512
    processes: int = 16
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class CallResult:
    """`value` is the tagged JSON text of what the call returned (shared.problems.values), or None and `error` names the
    exception type (TypeError, Timeout, Unprintable, …)."""

    value: str | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class FunctionRun:
    """One fresh sandbox. `args`: tagged JSON texts, each a list of positional arguments."""

    source: str
    entry: str
    args: tuple[str, ...]
    limits: Limits = Limits()
    forbidden_imports: tuple[str, ...] = ()  # the problem's origin module
    stop_at_error: bool = False


class Functions(Protocol):
    async def run(self, runs: Sequence[FunctionRun]) -> list[list[CallResult]]:
        """One list of results per run, one result per call, in order. A run that died or hung has error results, never
        an exception; SandboxUnavailable is raised only when the sandbox itself fails."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int | None  # None: killed at the time limit
    stdout: bytes
    stderr: bytes
    seconds: float
    truncated: bool


class Sandbox(Protocol):
    """A running sandbox with a writable work directory."""

    async def exec(self, argv: Sequence[str], *, time_s: float, stdin: bytes = b"") -> CommandResult: ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def read(self, path: str, limit: int) -> bytes: ...

    async def close(self) -> None: ...


class Sandboxes(Protocol):
    async def start(self, files: dict[str, bytes], limits: Limits) -> Sandbox: ...


def connect(kind: str, workers: int) -> FunctionPool:
    """`bubblewrap`, or `process` for code that you trust (explicit opt-in: ETUDE_SANDBOX=process). Starts nothing yet; the
    first run raises SandboxUnavailable where the machine cannot isolate."""
    from shared.sandbox.pool import FunctionPool
    from shared.sandbox.slot import Slot

    if kind == "bubblewrap":
        from shared.sandbox import bubblewrap

        return FunctionPool(lambda n: Slot(lambda: bubblewrap.start(n), bubblewrap.standard_module_paths), workers)
    if kind == "process":
        from shared.sandbox import process

        return FunctionPool(lambda _: Slot(process.start, lambda top: ()), workers)
    raise ValueError(f"sandbox: found {kind!r}; allowed: bubblewrap, process")


def connect_commands(kind: str) -> Sandboxes:
    """`bubblewrap`; commands of a repository never run as bare processes."""
    if kind == "bubblewrap":
        from shared.sandbox.commands import BubblewrapSandboxes

        return BubblewrapSandboxes()
    raise ValueError(f"sandbox for commands: found {kind!r}; allowed: bubblewrap")


def tagged(value: Any) -> str:
    """Shorthand for shared.problems.values.encode, the encoding of arguments and results."""
    from shared.problems.values import encode

    return encode(value)
