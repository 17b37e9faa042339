"""The loop as the first process of a container: its own user namespace, its deadline, and the counters of its cgroup.

The container has no capability and a user of its own on the host. The loop therefore runs in a user namespace, where that user is
called UID and may make the namespaces of its cells and mount its places (layer.py). It gives the user nothing outside.

Invariants:
- The container's first process runs no foreign code, and no process inside can see or signal it.
- The loop ends at its deadline, which requests only bring nearer, and the container ends with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from shared.sandbox.inside import cell, confine, frames, tree
from shared.sandbox.inside.cells import READ, Process
from shared.sandbox.inside.layer import Layers
from shared.sandbox.inside.loop import Loop
from shared.sandbox.inside.starvation import LOOK_S, Starvation

SCRATCH = "/.etude-scratch"
UID = 61000  # of everything inside, as it sees itself; distributions and container engines hand this id out to nobody
REFUSED = (
    "this host gives containers no user namespace, which keep sandboxes apart; allow them: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0, user.max_user_namespaces above 0"
)
# In its own user namespace: SYS_ADMIN to make cells and mounts, KILL to end cells, DAC_OVERRIDE and FOWNER to read and remove the
# files of its user that this user closed to itself.
_CAPABILITIES = 1 << 21 | 1 << 5 | 1 << 1 | 1 << 3
_RING_S = 5.0  # between two measurements of a sandbox that works, whatever the disk tells
_LOOK_S, _LOOK_MOST_S = 0.01, 0.25  # between two looks at the disk: less near the limit
_DISK = 2e9  # bytes that are surely not written in a second
# By cgroup v2, then v1: the file, and the line that counts.
_MEMORY = (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"))
_FORKS = (("/sys/fs/cgroup/pids.events", "max"), ("/sys/fs/cgroup/pids/pids.events", "max"))
_STAT, _STAT_1 = "/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat"
_HELD = ((_STAT, "anon"), (_STAT_1, "total_rss"))
_FAULTS = ((_STAT, "pgmajfault"), (_STAT_1, "total_pgmajfault"))
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def counted(places: tuple[tuple[str, str], ...]) -> int:
    """Return the first counter that exists; 0: this container has none. It is asked for every script: files stay open."""
    for path, name in places:
        fd, pattern = _counter(path, name)
        found = pattern.search(os.pread(fd, 1 << 14, 0)) if fd >= 0 else None
        if found:
            return int(found[1])
    return 0


@functools.cache
def _counter(path: str, name: str) -> tuple[int, re.Pattern[bytes]]:
    """Return an open file, -1 where it does not exist, and what finds the number in it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        fd = -1
    return fd, re.compile(b"^%b (\\d+)$" % name.encode(), re.MULTILINE)


def memory_limit() -> int:
    """Return the bytes that the container may hold; 0: nobody says."""
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return int(file.read())
    return 0


def held() -> int:
    """Return the bytes of open files without a name, but for those in memory: they are in no layer that the engine measures."""
    nameless = os.memfd_create("device")
    memory = {os.fstat(nameless).st_dev, os.stat("/dev/shm").st_dev, os.stat(SCRATCH).st_dev}
    os.close(nameless)
    found: dict[tuple[int, int], int] = {}
    for pid in tree.read():
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    info = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(info.st_mode) and not info.st_nlink and info.st_dev not in memory:
                        found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(found.values())


class Errand(Process):
    """Work of the loop itself on the layers, in a process of its own. It runs no foreign code and keeps the loop's rights."""

    def strike(self, cause: str) -> None:
        """Cells are struck, and errands end by themselves."""

    def _start(self, fds: dict[int, int], body: Callable[[], Any]) -> None:
        self._note_fd, theirs = os.pipe()
        try:
            pid = os.fork()
        except OSError:  # the sandbox is full of processes
            for fd in {*fds.values(), theirs, self._note_fd}:
                os.close(fd)
            raise
        if pid == 0:
            code = 125
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number, fd in fds.items():
                    os.dup2(fd, number)
                os.close(self._in)  # else its standard input never ends
                for fd in {*fds.values()} - {*fds}:
                    os.close(fd)
                code = int(body() or 0)
            except BaseException as error:
                os.write(theirs, f"{type(error).__name__}: {error}".encode(errors="replace")[:4000])
            finally:
                os._exit(code)
        self.pid = pid
        for fd in {*fds.values(), theirs}:
            os.close(fd)
        self.loop.cells[self.number] = self
        os.set_blocking(self._note_fd, False)
        self.loop.watch(self._note_fd, READ, self._read_note)


class ContainerLoop(Loop):
    """See the module. `ends`: on the monotonic clock.

    Answers to `run` have besides: memory and forks (events that the kernel has counted), free (bytes of the disk).
    Requests besides those of the loop:
      start    id, layer: an order to the layers (layer.py)       start an errand, which the adapter follows like a program
      until    seconds                                            bring the deadline nearer
      disk     id, bytes, most -> free     when the disk has `bytes` less free than at its best since, or _RING_S have passed, send
                                           a frame OUTPUT for this id; when it has `most` less, also stop all cells. The next
                                           `disk` lets them go on
    """

    ends = 0.0
    _alarm: tuple[int, int, int] | None = (
        None  # the id, and how much less free bytes mean to send, and to stop the cells
    )
    _best = 0  # free bytes at most since the alarm was set: others may delete while the sandbox writes
    _rang = _stopped = False
    _looked = _set_at = _weighed = 0.0
    _look_s = _LOOK_S  # until the next look
    _starvation = Starvation()
    layers: Layers

    def answer(self, number: int, head: dict[str, Any], blob: bytes = b"") -> None:
        if "seconds" in head:  # of a script
            head = {**head, "memory": counted(_MEMORY), "forks": counted(_FORKS), "free": self.layers.free()}
        super().answer(number, head, blob)

    def _do_start(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        if "layer" not in head:
            super()._do_start(number, head, blob)
            return
        if head["layer"]["do"] == "mount":
            self.layers.number += 1
        order = {**head["layer"], "number": self.layers.number}
        Errand(self, int(head["id"]), number).begin(lambda: self.layers.serve(order), merged=False)

    def _do_until(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        self.ends = min(self.ends, time.monotonic() + float(head["seconds"]))
        self.answer(number, {})

    def _do_disk(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        now = self.layers.free()
        self._alarm = (int(head["id"]), int(head["bytes"]), int(head["most"]))
        self._best, self._rang, self._set_at, self._look_s = now, False, time.monotonic(), _LOOK_S
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False
        self.answer(number, {"free": now})

    def _do_held(self, number: int, head: dict[str, Any], blob: bytes) -> None:
        """Answer the bytes of files on the disk that have no name any more, but are open."""
        self.answer(number, {"bytes": held()})

    def _signal(self, number: int) -> None:
        table = tree.read()
        keepers = {one.pid for one in self.cells.values()}
        tree.send({pid for keeper in keepers for pid in tree.below(table, keeper)} - keepers, number)

    def _pause(self) -> float | None:
        now = time.monotonic()
        times = [self.ends - now]
        if (soon := super()._pause()) is not None:
            times.append(soon)
        if self._busy():
            times.append(self._weighed + LOOK_S - now)
            if self._alarm is not None:
                times.append(self._looked + self._look_s - now)
        return max(0.0, min(times))

    def _busy(self) -> bool:
        return any(isinstance(one, Process) or one.deadline is not None for one in self.cells.values())

    def _time(self) -> None:
        super()._time()
        now = time.monotonic()
        if now >= self.ends:
            raise EOFError("deadline")
        if self._busy() and now - self._weighed >= LOOK_S:
            self._weighed = now
            self._relieve(now)
        if self._alarm is not None and now - self._looked >= self._look_s:
            self._looked = now
            number, ring, stop = self._alarm
            free = self.layers.free()
            self._best = max(self._best, free)
            left = free - (self._best - (stop if self._rang else ring))
            self._look_s = min(_LOOK_MOST_S, max(_LOOK_S, left / _DISK))
            if not self._rang and (free < self._best - ring or (now - self._set_at >= _RING_S and self._busy())):
                self._rang = True
                self.tell(frames.output(number, b"!"))
            if free < self._best - stop and not self._stopped:
                self._stopped = True
                self._signal(signal.SIGSTOP)

    def _relieve(self, now: float) -> None:
        """Kill the largest process of a container that starves, as the kernel does where memory runs out."""
        limit = memory_limit()
        if limit and self._starvation.look(now, counted(_HELD), limit, counted(_FAULTS)):
            table = tree.read()
            pids = {pid for one in self.cells.values() for pid in tree.below(table, one.pid)}
            if pids:
                tree.send([max(pids, key=lambda pid: table[pid].resident)], signal.SIGKILL)
                self.kills += 1


def loop_pid() -> int:
    """Fork the loop into a user namespace. Return 0 in the loop; its pid in the parent; -1 where this is not allowed."""
    user, group = os.getuid(), os.getgid()
    waiting, go = os.pipe()
    try:
        pid = confine.fork_into_namespaces(confine.CLONE_NEWUSER | confine.CLONE_NEWNS)
    except confine.Unconfinable:
        return -1
    if pid:
        os.close(waiting)
        try:
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{UID} {user} 1"),
                ("gid_map", f"{UID} {group} 1"),
            ):
                with open(f"/proc/{pid}/{name}", "w") as file:
                    file.write(text)
            os.write(go, b"+")
        except OSError:
            os.close(go)
            os.waitpid(pid, 0)
            return -1
        os.close(go)
        return pid
    os.close(go)
    if os.read(waiting, 1) != b"+":
        os._exit(1)
    os.close(waiting)
    confine._check(confine._libc.mount(None, b"/", None, confine._MS_REC | confine._MS_PRIVATE, None), "private mounts")
    return 0


def _wait_for(pid: int) -> None:
    """Reap until the loop ends. The container's other processes then end with this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    cell.hide_self()
    os.closerange(0, 256)
    while os.waitpid(-1, 0)[0] != pid:
        pass


def main() -> None:
    """Serve on standard input and output. Argument: {"seconds": until the loop ends, "places", "inner", "mounts": see
    Layers}."""
    options = json.loads(sys.argv[1])
    ends = time.monotonic() + float(options["seconds"])
    pid = loop_pid()
    if pid > 0:
        _wait_for(pid)
        return
    if pid < 0:
        sys.exit(REFUSED)
    inward, outward = os.dup(0), os.dup(1)
    layers = Layers(list(options["places"]), list(options["inner"]), mounts=list(options["mounts"]))
    serve(inward, outward, ends, layers)


def serve(inward: int, outward: int, ends: float, layers: Layers) -> None:
    """Be the loop, in the process that `loop_pid` forked. `inward`, `outward`: the channel. `ends`: on the monotonic clock."""
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    for fd in (inward, outward):
        os.set_inheritable(fd, False)
    cell.hide_self()
    cell.adopt()
    namespaces = _own_proc() and cell.namespaces_allowed()
    layers.begin()
    confine._set_capabilities(_CAPABILITIES)
    rules = cell.Rules(namespaces=namespaces, scratch=SCRATCH if namespaces else "")
    loop = ContainerLoop(inward, outward, rules, SCRATCH)
    loop.ends, loop.layers = ends, layers
    loop.serve()
    tree.end_all(os.getpid(), cell._reap)


def _own_proc() -> bool:
    """Whether the kernel lets a cell have a /proc of its own: not where the container's is masked."""
    try:
        pid = confine.fork_into_namespaces(confine.CLONE_NEWPID | confine.CLONE_NEWNS)
    except confine.Unconfinable:
        return False
    if pid == 0:
        flags = confine._MS_NOSUID | confine._MS_NODEV | 8  # MS_NOEXEC
        os._exit(0 if confine._libc.mount(b"proc", b"/proc", b"proc", flags, None) == 0 else 1)
    return os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    main()
