"""Memory and processes of one sandbox, limited and counted by the kernel: cgroup v2 where its controllers are ours, else v1.

A group lies below the cgroup of this process, so that limits on this process hold for its sandboxes, too. The sandbox's first
process stays outside of the group: when memory runs out, the kernel ends a cell and not the loop.

With v2 this process's own cgroup must offer the controllers to its children (`cgroup.subtree_control`), which the kernel allows
where that cgroup has no processes itself or is the root: a service manager delegates it so.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.sandbox.channel import Counts
from shared.sandbox.inside import tree
from shared.sandbox.inside.starvation import Starvation

PREFIX = "etude-sandbox-"
_END_S = 5.0
_MET = 0.9  # of the limit: v1 does not say that it was met, only how much there was at most


@dataclass(frozen=True, slots=True)
class Place:
    """Where groups are made. `version`: 1 or 2. `memory`, `processes`: the folder whose children have that controller, or None."""

    version: int
    memory: Path | None
    processes: Path | None

    @property
    def memory_by(self) -> str:
        """Who limits the memory of a whole sandbox."""
        return f"cgroup v{self.version}" if self.memory else "watchdog"


NOWHERE = Place(0, None, None)


def find(membership: str, mounts: str) -> Place:
    """Return the place for groups, from the texts of /proc/self/cgroup and /proc/self/mountinfo; NOWHERE: none is usable."""
    trees = _trees(membership, mounts)
    unified = trees.get("")
    if unified is not None and _offers(unified, "memory"):
        return Place(2, unified, unified if _offers(unified, "pids") else None)
    memory, processes = (folder if _writable(folder) else None for folder in (trees.get("memory"), trees.get("pids")))
    return Place(1, memory, processes) if memory else NOWHERE


def clocks(membership: str, mounts: str) -> list[tuple[Path, str]]:
    """Return the folders in which a group can be made that counts its processor time, best first, each with the file of such a
    group that has the count. With v2 every group has it, whichever controllers are delegated."""
    trees = _trees(membership, mounts)
    places = ((trees.get(""), "cpu.stat"), (trees.get("cpuacct"), "cpuacct.usage"))
    return [(folder, file) for folder, file in places if folder is not None and _writable(folder)]


def _trees(membership: str, mounts: str) -> dict[str, Path]:
    """Return the folder of this process's own cgroup by controller; "": of v2."""
    own = {}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            own[name] = path
    trees: dict[str, Path] = {}
    for line in mounts.splitlines():
        words = line.split()
        kind, _, options = words[words.index("-") + 1 : words.index("-") + 4]
        root, point = words[3], words[4]
        names = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            if name in own and (root == "/" or f"{own[name]}/".startswith(f"{root}/")):
                inner = own[name] if root == "/" else own[name][len(root) :]
                trees[name] = Path(point) / inner.lstrip("/")
    return trees


def here() -> Place:
    try:
        return find(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except (OSError, ValueError):
        return NOWHERE


def clocks_here() -> list[tuple[Path, str]]:
    try:
        return clocks(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except (OSError, ValueError):
        return []


def _writable(folder: Path | None) -> bool:
    return folder is not None and folder.is_dir() and os.access(folder, os.W_OK)


def _offers(folder: Path, controller: str) -> bool:
    """Whether children of a v2 cgroup have a controller, or can be given it."""
    try:
        if controller not in (folder / "cgroup.controllers").read_text().split() or not _writable(folder):
            return False
        control = folder / "cgroup.subtree_control"
        if controller not in control.read_text().split():
            control.write_text(f"+{controller}")
        return True
    except OSError:
        return False


def folders(place: Place, name: str) -> list[Path]:
    """Return the folders of a group of this name."""
    return list({found / f"{PREFIX}{name}": None for found in (place.memory, place.processes) if found is not None})


class Group:
    """The cgroups of one sandbox. Raises OSError where they cannot be made."""

    def __init__(self, place: Place, name: str) -> None:
        self._place, self.folders = place, folders(place, name)
        self._fds: list[int] = []
        self._limit = 0
        self._starvation = Starvation()
        self._relieved = 0  # processes that `relieve` has killed
        self._memory = self._forks = self._full = self._use = -1
        try:
            for folder in self.folders:
                folder.mkdir()
            self._memory = self._counter(place.memory, name, "memory.events", "memory.oom_control")
            self._full = self._counter(place.memory, name, "memory.events", "memory.max_usage_in_bytes")
            self._use = self._counter(place.memory, name, "memory.stat", "memory.stat")
            self._forks = self._counter(place.processes, name, "pids.events", "pids.events")
        except BaseException:
            self.remove()
            raise

    def _counter(self, parent: Path | None, name: str, v2: str, v1: str) -> int:
        if parent is None:
            return -1
        fd = os.open(parent / f"{PREFIX}{name}" / (v2 if self._place.version == 2 else v1), os.O_RDONLY | os.O_CLOEXEC)
        self._fds.append(fd)
        return fd

    def limit(self, memory: int, processes: int) -> None:
        """Raises OSError."""
        self._limit = memory
        for folder in self.folders:
            for file, value in _limits(self._place.version, memory, processes):
                if (folder / file).exists():
                    with contextlib.suppress(OSError) if "sw" in file else contextlib.nullcontext():
                        (folder / file).write_text(str(value))

    def joins(self) -> list[int]:
        """Open descriptors by which a process puts itself into the group, to be closed by the caller."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY) for folder in self.folders]

    @property
    def counts_forks(self) -> bool:
        return self._forks >= 0

    def counts(self) -> Counts:
        full: int | None = None
        if self._full >= 0 and self._place.version == 2:
            full = _number(self._full, b"oom")
        elif self._full >= 0 and _number(self._full, b"") < _MET * self._limit:
            full = 0
        memory = _number(self._memory, b"oom_kill") + self._relieved
        return Counts(memory, _number(self._forks, b"max"), None if full is None else full + self._relieved)

    def relieve(self, now: float) -> None:
        """Kill the largest process of a group that starves, as the kernel does where memory runs out. `now`: seconds."""
        held, faults = (b"anon", b"pgmajfault") if self._place.version == 2 else (b"total_rss", b"total_pgmajfault")
        if self._starvation.look(now, _number(self._use, held), self._limit, _number(self._use, faults)):
            looks = {pid: found for pid in self._pids() if (found := tree.look(pid)) is not None}
            if looks:
                tree.send([max(looks, key=lambda pid: looks[pid].resident)], signal.SIGKILL)
                self._relieved += 1

    def _pids(self) -> list[int]:
        memory = self._place.memory
        own = next((folder for folder in self.folders if folder.parent == memory), None)
        try:
            return [] if own is None else [int(word) for word in (own / "cgroup.procs").read_text().split()]
        except (OSError, ValueError):
            return []

    def remove(self) -> None:
        """Kill what is left in the group, and remove it. Repeating it does nothing."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        end(self.folders)


def _limits(version: int, memory: int, processes: int) -> Iterable[tuple[str, int]]:
    if version == 2:
        return (("memory.max", memory), ("memory.swap.max", 0), ("pids.max", processes))
    return (
        ("memory.limit_in_bytes", memory),
        ("memory.memsw.limit_in_bytes", memory),
        ("pids.max", processes),
    )


def _number(fd: int, name: bytes) -> int:
    """Return the number behind a name, or the file's only one where the name is empty."""
    if fd < 0:
        return 0
    try:
        for line in os.pread(fd, 4096, 0).splitlines():
            key, _, value = line.rpartition(b" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def end(groups: Iterable[Path]) -> None:
    """Kill what is in cgroups, and remove these."""
    deadline = time.monotonic() + _END_S
    for folder in groups:
        while folder.is_dir() and time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.005)
