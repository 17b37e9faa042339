"""Which cores of this machine gradings use. A grading asks before it starts a second run beside its first one.

A claim holds nobody back: any number of gradings may run. It only says that a core is free of them. Gradings of all processes
that share the folder count. A process that dies loses its claims.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, cgroup v2: microseconds per period, or max


@contextlib.contextmanager
def claimed(folder: Path, wanted: int) -> Iterator[int]:
    """Claim up to `wanted` cores until the block ends. Yield how many were free; 0: other gradings use them all. Raises OSError
    where the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as claims:
        claimed = 0
        for core in range(count()):
            if claimed == wanted:
                break
            if (lock := _locked(folder / str(core))) is not None:
                claims.callback(_release, lock)
                claimed += 1
        yield claimed


def count() -> int:
    """Return how many cores this process may use: those of its affinity, and at most the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = (int(part) for part in _QUOTA.read_text().split())  # ValueError: max
        cores = min(cores, quota // period)
    return cores


def _locked(path: Path) -> int | None:
    """Return the descriptor of the locked file; None: somebody else holds it, or it is another user's."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _release(lock: int) -> None:
    fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child has the file open as well
    os.close(lock)
