"""Measures the processor time that all processes of a function run have used together.

Invariants:
- `read` never says more than was used, but for the time of the nursery itself and a few ticks of rounding.
- The kernel's count (a cgroup of the nursery's own) is exact: processes count that ended, whether anybody waited for them or not.
- A group belongs to one nursery. Its name tells which process made it, on which boot and in which namespace of process ids.
- Without a cgroup the meter samples /proc. A process that ended counts as it was last seen, or as its parent counts it. Time after
  the last look at a process for which nobody waited is missing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shared import process
from shared.sandbox import cgroups
from shared.sandbox.inside import tree

SAMPLE_S = 0.05  # between two looks at a run: few last longer
PREFIX = "etude-run-"
_END_S = 1.0
_TICKS = 100 if os.name != "posix" else os.sysconf("SC_CLK_TCK")
_ROUNDING = 2  # ticks that the counts of one process may be too low by


@dataclass(frozen=True, slots=True)
class Reading:
    """`seconds`: processor time since the run began. `several`: the run has more than one process now."""

    seconds: float
    several: bool


class Meter(Protocol):
    def begin(self) -> None:
        """A run begins."""

    def read(self) -> Reading: ...

    @property
    def exact(self) -> bool:
        """Whether the last processes of a run are counted, too, when `read` is called after its end."""

    def close(self) -> None:
        """Repeating it does nothing."""


class KernelMeter:
    """A cgroup that the nursery and all that it starts belong to. Raises OSError where there can be none."""

    exact = True

    def __init__(self, pid: int, places: list[tuple[Path, str]] | None = None) -> None:
        """`places`: see cgroups.clocks; None: those of this process."""
        me = process.identity(os.getpid())
        if me is None:
            raise FileNotFoundError("this system does not name its processes")
        name = f"{_of_machine(me)}{me.pid}-{me.ticks}-{secrets.token_hex(8)}"
        problem: OSError = FileNotFoundError("no cgroup here counts processor time")
        for parent, file in cgroups.clocks_here() if places is None else places:
            sweep(parent)
            folder = parent / name
            try:
                folder.mkdir()
            except OSError as error:
                problem = error
                continue
            self._folder = folder
            try:
                self._usage = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
                self._members = os.open(self._folder / "cgroup.procs", os.O_RDWR | os.O_CLOEXEC)
                os.write(self._members, str(pid).encode())
                self.begin()
                return
            except OSError as error:
                problem = error
                self.close()
        raise problem

    _usage = _members = -1
    _begun = 0.0

    def begin(self) -> None:
        self._begun = self._used()

    def read(self) -> Reading:
        members = os.pread(self._members, 65536, 0).count(b"\n")
        return Reading(self._used() - self._begun, members > 2)  # the nursery and the first process of the run

    def _used(self) -> float:
        text = os.pread(self._usage, 4096, 0)
        if text[:1].isdigit():
            return int(text) / 1e9
        return int(text.split(b"usage_usec ", 1)[1].split(b"\n", 1)[0]) / 1e6

    def close(self) -> None:
        """The nursery has been killed; the kernel needs a moment to take its processes out of the group."""
        for fd in (self._usage, self._members):
            if fd >= 0:
                os.close(fd)
        self._usage = self._members = -1
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            try:
                return self._folder.rmdir()
            except FileNotFoundError:
                return None
            except OSError:
                time.sleep(0.002)
        return None


def _of_machine(one: process.Identity) -> str:
    """Return what the names of groups of a boot and a namespace of process ids begin with: containers may share cgroups."""
    return f"{PREFIX}{one.boot}.{one.namespace.strip('pid:[]')}-"


def sweep(parent: Path) -> None:
    """Remove the empty groups of services that are gone. Those of other namespaces stay: their owners cannot be seen here."""
    me = process.identity(os.getpid())
    if me is None:
        return
    mine = _of_machine(me)
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{mine}*-*-*"):
            pid, ticks, _ = folder.name.removeprefix(mine).split("-", 2)
            if not (pid.isdecimal() and ticks.isdecimal()):
                continue
            if process.lives(process.Identity(me.boot, me.namespace, int(pid), int(ticks))) is False:
                with contextlib.suppress(OSError):
                    folder.rmdir()


@dataclass(slots=True)
class Sum:
    """Adds up samples of a process tree, in ticks.

    `lost`: ticks of processes that ended and that no living process counts as waited for.
    """

    lost: int = 0
    _known: dict[tuple[int, int], tree.Process] = field(default_factory=dict)

    def add(self, living: dict[int, tree.Process]) -> int:
        """Take the next sample, of all processes that are alive or not yet waited for. Return the sum of all so far."""
        now = {(pid, process.started): process for pid, process in living.items()}
        ended = sum(one.own + one.waited for key, one in self._known.items() if key not in now)
        taken_over = sum(
            one.waited - (self._known[key].waited if key in self._known else 0) for key, one in now.items()
        )
        if ended:
            self.lost += max(0, ended - taken_over - _ROUNDING * len(now))
        self._known = now
        return self.lost + sum(one.own + one.waited for one in now.values())

    @property
    def known(self) -> list[tuple[int, int]]:
        """The pids of the last sample, each with its start."""
        return list(self._known)


class SampledMeter:
    """Looks at the processes below the nursery. `pid`: the nursery's."""

    exact = False

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.begin()

    def begin(self) -> None:
        self._sum = Sum()

    def read(self) -> Reading:
        table = tree.read_below(self._pid)
        living = {pid: table[pid] for pid in tree.below(table, self._pid)}
        for (
            pid,
            started,
        ) in self._sum.known:  # it may have lost its parent, or the kernel's list of children left it out
            if pid not in living and (found := tree.look(pid)) is not None and found.started == started:
                living[pid] = found
        ticks = self._sum.add(living)
        return Reading(ticks / _TICKS, sum(not one.zombie for one in living.values()) > 1)

    def close(self) -> None:
        pass


def of(pid: int) -> Meter:
    """Return the best meter for a nursery."""
    try:
        return KernelMeter(pid)
    except (OSError, ValueError, IndexError):
        return SampledMeter(pid)
