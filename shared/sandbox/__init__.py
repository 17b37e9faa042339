"""Sandboxes: candidate code is hostile. It never runs outside one, never sees the network, credentials or the grader.

`Functions` runs one function on many inputs (problems of kind `function`); expected outputs never enter the sandbox:
the caller compares. `connect` gives one. shared.sandbox.contract has the sandboxes in which an agent lives (problems of kind
`repository`); `connect_sandboxes` gives an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shared.sandbox import contract
    from shared.sandbox.pods.objects import Cluster
    from shared.sandbox.pool import FunctionPool


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate code; the text says what is missing and how to get it. Infrastructure, never a reward."""


@dataclass(frozen=True, slots=True)
class Limits:
    time_s: float = 2.0  # wall clock for all calls of one run
    # Processor time of all processes of a run together, in whole seconds rounded up; 0: as time_s.
    cpu_s: float = 0.0
    call_s: float = 0.1  # processor time for one call
    memory_mb: int = 512
    processes: int = 16
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class CallResult:
    """`value` is the tagged JSON text of what the call gave (shared.problems.values), or None and `error` names the
    exception type (TypeError, Timeout, CpuLimit, Unprintable, …). `changed`: `value` is an argument that the call changed in place
    while it returned None; False: the call returned `value`."""

    value: str | None
    error: str = ""
    changed: bool = False


@dataclass(frozen=True, slots=True)
class FunctionRun:
    """One fresh sandbox. `args`: tagged JSON texts, each a list of positional arguments."""

    source: str
    entry: str
    args: tuple[str, ...]
    limits: Limits = Limits()
    forbidden_imports: tuple[str, ...] = ()  # the problem's origin module
    stop_at_error: bool = False


CANARY = FunctionRun(source="def f(): return 1", entry="f", args=("[]",))  # fails only where every run would


class Functions(Protocol):
    async def run(self, runs: Sequence[FunctionRun]) -> list[list[CallResult]]:
        """One list of results per run, one result per call, in order. A run that died or hung has error results, never
        an exception; SandboxUnavailable is raised only when the sandbox itself fails."""

    async def close(self) -> None: ...


def connect(kind: str, workers: int) -> FunctionPool:
    """`bubblewrap`, or `process` for code that you trust (explicit opt-in: ETUDE_SANDBOX=process). `docker` and `kubernetes` are
    for repositories alone: functions run in bubblewrap then. Starts nothing yet; the first run raises SandboxUnavailable where
    the machine cannot isolate."""
    from shared.sandbox.pool import FunctionPool
    from shared.sandbox.slot import Slot

    if kind in ("bubblewrap", "docker", "kubernetes"):
        from shared.sandbox import bubblewrap

        return FunctionPool(lambda n: Slot(lambda: bubblewrap.start(n), bubblewrap.standard_module_paths), workers)
    if kind == "process":
        from shared.sandbox import process

        return FunctionPool(lambda _: Slot(process.start, lambda top: ()), workers)
    raise ValueError(f"sandbox: found {kind!r}; allowed: bubblewrap, docker, kubernetes, process")


def open_sandboxes(
    kind: str,
    state: Path | None = None,
    bases: Callable[[str], Path] | None = None,
    cluster: Cluster | None = None,
) -> contract.Sandboxes:
    """Return the adapter for sandboxes in which an agent lives (shared.sandbox.contract): `bubblewrap`, `docker` or `kubernetes`.
    `state`: the folder for files of its sandboxes; None: one in the directory for temporary files. `bases`: gives the unpacked
    folder of an image (`base:<digest>`); None: there are the host's programs alone. Only bubblewrap uses these two. `cluster`:
    where pods run; None: as its defaults say. Starts nothing yet."""
    if kind == "bubblewrap":
        from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandboxes

        return BubblewrapSandboxes(state, bases)
    if kind == "docker":
        from shared.sandbox.containers.sandboxes import ContainerSandboxes

        return ContainerSandboxes()
    if kind == "kubernetes":
        from shared.sandbox.pods.objects import Cluster
        from shared.sandbox.pods.sandboxes import PodSandboxes

        return PodSandboxes(cluster or Cluster())
    raise ValueError(f"sandboxes: found {kind!r}; allowed: bubblewrap, docker, kubernetes")


def connect_sandboxes(
    kind: str,
    state: Path | None = None,
    bases: Callable[[str], Path] | None = None,
    cluster: Cluster | None = None,
) -> contract.Sandboxes:
    """Return what `open_sandboxes` does, for callers in any event loop and in several. `kind`: the setting ETUDE_SANDBOX; an agent
    never works in bare processes, so `process` gives `bubblewrap`."""
    from shared.sandbox.any_loop import AnyLoopSandboxes

    return AnyLoopSandboxes(open_sandboxes("bubblewrap" if kind == "process" else kind, state, bases, cluster))


def tagged(value: Any) -> str:
    """Shorthand for shared.problems.values.encode, the encoding of arguments and results."""
    from shared.problems.values import encode

    return encode(value)
