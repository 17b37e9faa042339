"""Sandboxes in which an agent lives for hours: the promises that every adapter keeps.

`Sandboxes.open` gives a `Sandbox`: a root file system, a work directory, limits and a network policy. `Sandbox.session` gives
a `Session`: a shell whose folder, variables and background processes stay from one command to the next.

Invariants:
- Nothing that runs inside reaches the host's files, environment, processes or network, another sandbox, or the adapter's own
  channel. Network traffic passes through the egress proxy or nowhere.
- Data cross the border as tar archives with caps. No link, device, FIFO, absolute path or `..` crosses it in either direction.
- Every call ends by a deadline. A command that outlives its own is killed with what it started: the command first, then its
  session, then the sandbox.
- A result says who is to blame: `Cause` is the task's own doing, shared.sandbox.SandboxUnavailable is ours.
- After `close`, or after the death of the process that opened it, nothing of a sandbox is left: no process, mount, folder,
  container or cgroup. `Sandboxes.reap` removes what a killed process left.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WORKSPACE = "/workspace"  # the work directory, unless an image has another


class Capability(enum.StrEnum):
    own_rootfs = "own_rootfs"  # a base of its own, not the host's programs
    sessions = "sessions"  # shells that live on
    snapshot = "snapshot"  # files can be set back
    fork = "fork"  # a snapshot opens in another sandbox
    network = "network"  # an allow-list through the egress proxy


@dataclass(frozen=True, slots=True)
class Base:
    """What a sandbox begins with.

    `image`: the root file system. `base:NAME` or `base:DIGEST`: a base that `etude sandbox base make` has made.
    `docker:REFERENCE`: an image. `pool:NAME`: the image of a pool of warm pods. Empty: the host's programs, read-only. Each
    adapter takes some of these and refuses the others.
    `tree`: a folder of the host that is copied into the work directory. None: the work directory is empty, or has what the
    image has there. The caller must not change the folder while the sandbox lives.
    `mounts`: (path on the host, path inside), read-only.
    `environment`: variables of every command, over the adapter's own. `workdir`: the work directory; empty: the image's own, or
    WORKSPACE where it names none.
    """

    image: str = ""
    tree: Path | None = None
    mounts: tuple[tuple[Path, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    workdir: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """`memory_mb`: of the whole sandbox, also what lies in memory file systems. `disk_mb`: of everything written.
    `processes`: processes and threads alive. `seconds`: from `open` to the end of the sandbox."""

    memory_mb: int = 2048
    disk_mb: int = 4096
    processes: int = 256
    seconds: float = 7200.0
    output_bytes: int = 1 << 20  # kept of one command's output, each of its two streams


@dataclass(frozen=True, slots=True)
class Credential:
    """The proxy adds `header: value` to requests to `host`. The value never enters the sandbox."""

    host: str
    header: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Network:
    """`allow`: hosts that may be reached, each `name`, `name:port` or `*.name`; none: no network at all."""

    allow: tuple[str, ...] = ()
    credentials: tuple[Credential, ...] = ()


NO_NETWORK = Network()


@dataclass(frozen=True, slots=True)
class Decision:
    """One request to the egress proxy. `why`: the rule that allowed or refused it."""

    at: float  # seconds since the epoch
    host: str
    port: int
    allowed: bool
    why: str


class Cause(enum.StrEnum):
    """Why a command ended. All of them are the task's own doing."""

    exited = "exited"
    signalled = "signalled"
    time_limit = "time_limit"
    memory_limit = "memory_limit"
    disk_limit = "disk_limit"
    process_limit = "process_limit"
    session_ended = "session_ended"  # the command ended its own shell


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`exit_code`: None where the command was killed at a limit; 128 + N where its last program died of signal N. It is a claim of
    the code inside. `lost_bytes`: left out of the middle of an output that was longer than its cap. `fresh`: the session had to
    be ended; its next command begins in a new shell."""

    exit_code: int | None
    cause: Cause
    stdout: bytes
    stderr: bytes
    seconds: float
    lost_bytes: int = 0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Caps:
    """Bounds of a transfer: bytes in all, and number of files."""

    size: int = 32 << 20
    files: int = 10_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Files of a sandbox as they were. `key`: a name that means something to the adapter alone."""

    key: str
    size: int  # bytes that differ from the base


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from the base in the work directory. `written`: a tar archive of new and changed files. `deleted`: paths.
    `refused`: path -> why it was left out (a link, a device, over a cap)."""

    written: bytes
    deleted: tuple[str, ...]
    refused: Mapping[str, str]


class Session(Protocol):
    """A shell that lives on. Used by one caller at a time."""

    async def run(
        self,
        script: str,
        *,
        time_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
    ) -> CommandResult:
        """Run a script in the shell. `env` and `cwd` hold for this script alone; None: those of the session. What background
        processes write after a script has ended is lost.

        Raises SandboxUnavailable where the sandbox itself fails.
        """

    async def close(self) -> None:
        """End the shell and everything that it started. Repeating it does nothing."""


class Program(Protocol):
    """A program with pipes that lives on, beside the sessions. No session can send it a signal or trace it."""

    @property
    def alive(self) -> bool: ...

    async def send(self, data: bytes) -> None:
        """Write to its standard input. Raises ConnectionError where the program is gone."""

    async def receive(self, most: int) -> bytes:
        """Return what it has written, at most `most` bytes; empty: it wrote its last."""

    async def kill(self) -> None:
        """End the program and everything that it started. Repeating it does nothing."""


class Sandbox(Protocol):
    """Paths are absolute as the sandbox sees them, or relative to the work directory."""

    @property
    def decisions(self) -> Sequence[Decision]:
        """Requests to the egress proxy so far."""

    async def session(self) -> Session: ...

    async def spawn(self, argv: Sequence[str]) -> Program: ...

    async def put(self, archive: bytes, at: str = "") -> None:
        """Unpack a tar archive into a folder. Raises ValueError for entries that may not cross the border."""

    async def get(self, paths: Sequence[str], caps: Caps = Caps()) -> bytes:
        """Return regular files and folders as a tar archive. Entries have the names that were asked for, without a first `/`.
        Links and devices in folders are left out. Raises FileNotFoundError, and ValueError over the caps."""

    async def changes(self, caps: Caps = Caps()) -> Changes:
        """Return what differs from the base. Nothing may run in the sandbox meanwhile. Raises ValueError over the caps."""

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are. Sessions go on; what they write meanwhile may be half in it."""

    async def restore(self, snapshot: Snapshot) -> None:
        """End all sessions and programs, and set all files back."""

    async def close(self) -> None:
        """End everything and remove the files, snapshots too. Repeating it does nothing."""


class Sandboxes(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    @property
    def memory_by(self) -> str:
        """Return the name of the mechanism that limits a sandbox's memory, for people: e.g. "cgroup v2", "watchdog"."""

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> Sandbox:
        """Open a sandbox; `snapshot`: with the files of one (capability `fork`). Raises SandboxUnavailable, and ValueError
        for a base, a limit or a capability that this adapter does not have."""

    async def reap(self) -> int:
        """Remove what processes that are gone have left. Return how many sandboxes that were."""

    async def close(self) -> None:
        """Close every open sandbox and the pool of warm ones."""
