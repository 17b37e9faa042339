"""What one bubblewrap sandbox has on the host: its folder, cgroup, uid and machine; its limits; and copies of its files."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from shared.sandbox import bubblewrap_machine, cgroups, folders, owners
from shared.sandbox.bubblewrap_machine import Machine, Plan
from shared.sandbox.channel import Counts, Inside
from shared.sandbox.contract import Limits

_OWN_PROCESSES = 8  # keepers of cells, and bubblewrap's, count as the sandbox's


@dataclass
class Place:
    """What a sandbox has on the host, and its machine."""

    name: str
    folder: Path
    plan: Plan
    etc: Path
    uid: owners.Uid | None = None
    group: cgroups.Group | None = None
    machine: Machine | None = None

    @property
    def number(self) -> int | None:
        return None if self.uid is None else self.uid.number

    async def boot(self) -> Machine:
        """Start the machine. Raises SandboxUnavailable."""
        joins = self.group.joins() if self.group else []
        try:
            self.machine = await bubblewrap_machine.start(self.plan, self.folder, self.etc, self.number, joins)
        finally:
            for fd in joins:
                os.close(fd)
        return self.machine

    async def remove(self) -> None:
        if self.machine is not None:
            await self.machine.kill()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        if self.group is not None:
            self.group.remove()
        folders.remove(self.folder)
        if self.uid is not None:
            self.uid.release()

    def counts(self) -> Counts:
        return self.group.counts() if self.group else Counts()


async def set_limits(inside: Inside, limits: Limits, place: Place, *, clear: bool = False) -> None:
    """`clear`: also empty /dev/shm."""
    memory, processes = limits.memory_mb << 20, limits.processes + _OWN_PROCESSES
    own = processes
    if place.group is not None:
        place.group.limit(memory, processes)
        if place.group.counts_forks:  # the cgroup is first, and counts what it refuses
            own = 2 * processes
    await inside.limit(
        processes=own,
        file_bytes=limits.disk_mb << 20,
        memory_bytes=0 if place.group else memory,
        crowd=processes,
        shm_bytes=memory // 2,
        clear=clear,
    )


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bfree * found.f_frsize


def used_bytes(plan: Plan, folder: Path) -> int:
    return sum(folders.used(folder / name) for name in plan.written)


def copy_written(plan: Plan, source: Path, target: Path, uid: int | None) -> int:
    """Copy all that was written inside. Return the bytes. Raises OSError."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    target.mkdir(mode=0o700)
    try:
        size = 0
        for name in plan.written:
            (target / name).mkdir(mode=0o755)
            size += folders.copy(source / name, target / name, uid)
        return size
    except BaseException:
        folders.remove(target)
        raise


def put_back(plan: Plan, source: Path, folder: Path, uid: int | None) -> None:
    """Replace all that was written inside, while no process is."""
    for name in plan.written:
        folders.empty(folder / name)
        os.chmod(folder / name, 0o755)
        folders.copy(source / name, folder / name, uid)
