"""Processes as /proc shows them, and ending all that descend from one of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from typing import NamedTuple


class Process(NamedTuple):  # `dataclasses` would double the time in which the loop starts
    parent: int
    started: int  # in ticks since the machine's start
    threads: int
    resident: int  # pages
    zombie: bool
    own: int = 0  # ticks of processor time
    waited: int = 0  # ticks of the children that it has waited for, and of those that these had waited for


def read(proc: str = "/proc") -> dict[int, Process]:
    """Return every process that this PID namespace shows. Names of programs are hostile and are not read."""
    found: dict[int, Process] = {}
    for name in os.listdir(proc):
        if name.isdigit() and (process := look(int(name), proc)) is not None:
            found[int(name)] = process
    return found


def read_below(root: int, proc: str = "/proc") -> dict[int, Process]:
    """Return the process and its descendants, at a cost that grows with these alone where the kernel lists children."""
    first = look(root, proc)
    if first is None or not os.path.exists(f"{proc}/{root}/task/{root}/children"):
        return read(proc)
    found = {root: first}
    waiting = [root]
    while waiting:
        for pid in children(waiting.pop(), proc):
            if pid not in found and (process := look(pid, proc)) is not None:
                found[pid] = process
                waiting.append(pid)
    return found


class Pair:
    """A process with one thread and its only child, held open in /proc: asking whether they are still alone takes three system
    calls, a look at both takes twenty. Raises OSError where the kernel does not list children, or one of them is gone."""

    def __init__(self, parent: int, child: int, proc: str = "/proc") -> None:
        self.child = child
        self._fds: list[int] = []
        try:
            for path in (f"{child}/task", f"{child}/task/{child}/children", f"{parent}/task/{parent}/children"):
                self._fds.append(os.open(f"{proc}/{path}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise

    def alone(self) -> bool:
        """Return whether nothing else descends from the parent. The child is asked first: an orphan of its children is the
        parent's before it leaves the child's list."""
        try:
            threads, below, beside = self._fds
            one = os.fstat(threads).st_nlink == 3  # `.`, `..` and a folder for each thread
            return one and not os.pread(below, 16, 0) and os.pread(beside, 32, 0).split() == [b"%d" % self.child]
        except (OSError, ValueError):
            return False

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def children(pid: int, proc: str = "/proc") -> list[int]:
    """Return the children of all threads of a process."""
    try:
        threads = os.listdir(f"{proc}/{pid}/task")
        texts = []
        for thread in threads:
            with open(f"{proc}/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                texts.append(file.read())
        return [int(word) for word in b" ".join(texts).split()]
    except (OSError, ValueError):
        return []


def look(pid: int, proc: str = "/proc") -> Process | None:
    """Return one process; None: it is gone."""
    try:
        fd = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = os.read(fd, 4096)
        finally:
            os.close(fd)
        fields = text.rpartition(b")")[2].split()
        parent, own, kernel, waited, waited_kernel, threads, started, resident = (
            int(fields[at]) for at in (1, 11, 12, 13, 14, 17, 19, 21)
        )
        zombie = fields[0] in (b"Z", b"X")
        return Process(parent, started, threads, resident, zombie, own + kernel, waited + waited_kernel)
    except (OSError, ValueError, IndexError):
        return None


def below(table: dict[int, Process], root: int, spared: Collection[tuple[int, int]] = ()) -> set[int]:
    """Return the descendants of a process, without those of `spared` (pid, started) and theirs."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        if pid in found or pid == root or (pid, table[pid].started) in spared:
            continue
        found.add(pid)
        waiting += children.get(pid, ())
    return found


def send(pids: Collection[int], number: int) -> None:
    for pid in pids:
        if pid > 1:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def end_all(root: int, reap: Callable[[], None], patience_s: float = 5.0) -> bool:
    """Kill the descendants of a process until none is left. Return whether none is. Each round stops them first, so that
    no process forks while the others are killed. `reap`: waits for the children of the caller that have ended."""
    deadline = time.monotonic() + patience_s
    while True:
        table = read()
        alive = {pid for pid in below(table, root) if not table[pid].zombie}
        reap()
        if not alive or time.monotonic() > deadline:
            return not alive
        send(alive, signal.SIGSTOP)
        send(alive, signal.SIGKILL)
        time.sleep(0.001)
