"""Which process of which machine, for ever: ids are used again, clocks are set, containers have equal names.

A process is named by the machine's boot, its namespace of process ids, its id there and the kernel's tick at which it
began. None of these moves with the clock. What cannot be known, on a system without /proc, is left open (None): whoever
asks must not take that for death.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

PROC = Path("/proc")
_DEAD = frozenset("ZXx")  # it has ended; only its parent has not asked yet


class Identity(msgspec.Struct, frozen=True):
    """`ticks`: of the kernel, since the boot. `namespace`: of process ids, as the kernel names it."""

    boot: str
    namespace: str
    pid: int
    ticks: int


def namespace() -> str:
    """Of process ids, this process's. Raises OSError where the kernel does not say."""
    return os.readlink(PROC / "self/ns/pid")


@functools.cache
def _here() -> tuple[str, str]:
    """(boot, namespace) of this process. Raises OSError where the kernel does not say."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip(), namespace()


def _began(pid: int) -> int | None:
    """None: there is no such process, or it has ended."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name before it, in parentheses, may hold anything; these are the fields from the third on.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in _DEAD else int(fields[19])


def identity(pid: int) -> Identity | None:
    """Of a living process that this one can see. None: there is none, or this system does not say."""
    try:
        here, ticks = _here(), _began(pid)
    except OSError:
        return None
    return None if ticks is None else Identity(*here, pid, ticks)


def lives(known: Identity) -> bool | None:
    """Whether that very process lives. None: it cannot be seen from here (another machine, another boot or container)."""
    try:
        if (known.boot, known.namespace) != _here():
            return None
        return _began(known.pid) == known.ticks
    except OSError:
        return None


_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec of a process with threads it could hang
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> Callable[[], None]:
    """For `preexec_fn`: SIGTERM for the child when the thread of process `parent` that starts it is no more."""

    def in_the_child() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)

    return in_the_child


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a child, wait for its end and close the pipes to it."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
