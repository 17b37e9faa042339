"""Ports that stay free until their server takes them.

A port that the kernel hands out may go to anybody's next connection once it is closed. So these lie outside the range from which
it does, and a lock on a file keeps each from other processes that ask here, until the one that asked ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 15_000, 65_535
TRIES = 1000

_held: list[IO[str]] = []


def free_ports(count: int) -> tuple[int, ...]:
    """Return `count` ports of 127.0.0.1, this process's until it ends."""
    return tuple(free_port() for _ in range(count))


def free_port() -> int:
    """Return a port of 127.0.0.1, this process's until it ends. Raises OSError where none is left."""
    folder = Path(tempfile.gettempdir()) / f"etude-ports-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    theirs, every = handed_out(), range(LOWEST, HIGHEST + 1)
    candidates = [
        port for port in every if port not in theirs
    ] or every  # it may hand out all; then the lock alone helps
    for port in random.SystemRandom().sample(candidates, min(TRIES, len(candidates))):
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if is_free(port):
            _held.append(lock)
            return port
        lock.close()
    raise OSError(f"no free port of 127.0.0.1 among {len(candidates)}: each is bound, or held by a lock in {folder}")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed connection lingers
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def handed_out() -> range:
    """Return the ports that the kernel hands out by itself; Linux' default where it does not say."""
    try:
        low, high = map(int, RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    return range(low, high + 1)
