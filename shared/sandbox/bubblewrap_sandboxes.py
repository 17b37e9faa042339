"""The bubblewrap adapter of shared.sandbox.contract: no daemon, and no privilege but user namespaces.

A sandbox is a folder (what is written inside), a cgroup where there is one, a uid of its own where this process is root, and
one bubblewrap whose first process is the loop of inside/loop.py. A command is a line to a shell that lives already.

Invariants:
- The host follows no link that a sandbox made: it reads and writes through cells (channel.Inside), and removes and copies with
  shared.sandbox.folders.
- A sandbox's folder names its cgroups before they exist: `reap` finds them after any death of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared import namespaces
from shared.sandbox import SandboxUnavailable, archives, bubblewrap, cgroups, folders, gateway, owners
from shared.sandbox.bubblewrap_machine import CODE, GATE, HOME, Plan
from shared.sandbox.bubblewrap_place import Place, copy_written, free_bytes, put_back, set_limits, used_bytes
from shared.sandbox.channel import ChannelProgram, ChannelSession, Inside
from shared.sandbox.contract import (
    NO_NETWORK,
    WORKSPACE,
    Base,
    Capability,
    Caps,
    Cause,
    Changes,
    Decision,
    Limits,
    Network,
    Snapshot,
)
from shared.sandbox.environment import QUIET
from shared.sandbox.gateway import Gateway, MakeProxy, proxy_of
from shared.sandbox.inside import transfer
from shared.sandbox.inside.starvation import LOOK_S

_DISK_S = 0.1  # between two looks at the disk
_DISK_SLACK = 1 << 20
_DIGEST_BYTES = 1 << 28  # a longer file counts as changed
_REFILL_S = 0.1  # after an opening: the first command has the processors
_GROUPS = "cgroups"  # the file that names a sandbox's cgroups
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": HOME,
    "USER": "agent",
    "LOGNAME": "agent",
    **QUIET,
}
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class BubblewrapSandbox:
    """See shared.sandbox.contract.Sandbox."""

    def __init__(
        self,
        place: Place,
        inside: Inside,
        limits: Limits,
        base: Base,
        gone: Callable[[BubblewrapSandbox], None],
        gateway: Gateway | None = None,
    ) -> None:
        self.inside, self._place, self._limits, self._base, self._gone = inside, place, limits, base, gone
        self._gateway = gateway
        self._snapshots = itertools.count()
        self._closed = False
        works = (self._watch_disk(), self._watch_memory(), self._end_in_time())
        self._tasks = [asyncio.create_task(work) for work in works]

    @property
    def decisions(self) -> Sequence[Decision]:
        return self._gateway.decisions if self._gateway is not None else ()

    @property
    def uid(self) -> int | None:
        """The host's uid of everything inside; None: this process's own."""
        return self._place.number

    async def session(self) -> ChannelSession:
        return await self.inside.session()

    async def spawn(self, argv: Sequence[str]) -> ChannelProgram:
        return await self.inside.spawn(argv)

    async def put(self, archive: bytes, at: str = "") -> None:
        await self.inside.put(archive, at)

    async def get(self, paths: Sequence[str], caps: Caps = Caps()) -> bytes:
        return await self.inside.get(paths, caps)

    async def changes(self, caps: Caps = Caps()) -> Changes:
        base = await asyncio.to_thread(self._base_lines)
        now = [line for line in await self.inside.scan(["."], _DIGEST_BYTES) if line.path]
        written, deleted, refused = archives.difference(base, now, caps)
        return Changes(await self.get(written, caps), deleted, refused)

    def _base_lines(self) -> list[archives.Line]:
        folder = self._base.tree
        if folder is None and self._place.plan.lower is not None:
            folder = self._place.plan.lower / WORKSPACE[1:]
        if folder is None or not folder.is_dir():
            return []
        return [archives.Line(*line) for line in transfer.lines(folder, _DIGEST_BYTES)]

    async def snapshot(self) -> Snapshot:
        self._check_open()
        target = self._place.folder / "snapshots" / str(next(self._snapshots))
        size = await asyncio.to_thread(copy_written, self._place.plan, self._place.folder, target, None)
        return Snapshot(str(target), size)

    async def restore(self, snapshot: Snapshot) -> None:
        self._check_open()
        source = Path(snapshot.key)
        if source.parent != self._place.folder / "snapshots" or not source.is_dir():
            raise ValueError(f"snapshot: found {snapshot.key!r:.200}; allowed: one of this sandbox")
        await self.inside.strike(Cause.session_ended)
        place = self._place
        if place.plan.lower is not None and place.machine is not None:  # an overlay's layers change only unmounted
            await place.machine.kill()
        await asyncio.to_thread(put_back, place.plan, source, place.folder, place.number)
        if place.plan.lower is not None:
            self.inside.channel = (await place.boot()).channel
            if self._gateway is not None:
                await self._gateway.open(self.inside.channel)
        await set_limits(self.inside, self._limits, place, clear=True)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._gateway is not None:
            await self._gateway.close()
        await self._place.remove()
        self._gone(self)

    def _check_open(self) -> None:
        if self._closed or not self.inside.channel.alive:
            raise SandboxUnavailable("the sandbox has ended; open another")

    async def _end_in_time(self) -> None:
        await asyncio.sleep(max(0.0, self.inside.ends - time.monotonic()))
        with contextlib.suppress(SandboxUnavailable):
            await self.inside.strike(Cause.time_limit)
        if self._place.machine is not None:
            await self._place.machine.kill()

    async def _used(self) -> int:
        """Return the bytes on the disk of all that was written, also of files that are open and have no name any more."""
        used = await asyncio.to_thread(used_bytes, self._place.plan, self._place.folder)
        with contextlib.suppress(SandboxUnavailable):
            answer, _ = await self.inside.channel.ask({"do": "held"})
            used += int(answer["bytes"])
        return used

    async def _watch_memory(self) -> None:
        while self._place.group is not None:
            await asyncio.sleep(LOOK_S)
            self._place.group.relieve(time.monotonic())

    async def _watch_disk(self) -> None:
        """End the commands that fill the disk. The disk's free space says cheaply when a look at every file is due."""
        limit, folder = self._limits.disk_mb << 20, self._place.folder
        used, struck, peak, due = 0, limit, 0, 0.0
        while True:
            await asyncio.sleep(_DISK_S)
            with contextlib.suppress(OSError):
                free, now = free_bytes(folder), time.monotonic()
                peak = max(peak, free)
                if peak - free < limit - used and now < due:
                    continue
                used = await self._used()
                # Others may free what this sandbox writes: so look from time to time in any case, at a twentieth of the time.
                peak, due = free, time.monotonic() + max(1.0, 20 * (time.monotonic() - now))
                if used > struck:
                    with contextlib.suppress(SandboxUnavailable):
                        await self.inside.strike(Cause.disk_limit)
                    used = await self._used()
                # A full disk does not end the command that tidies up: only one that writes still more.
                struck = limit if used <= limit else used + _DISK_SLACK


@dataclass
class BubblewrapSandboxes:
    """See shared.sandbox.contract.Sandboxes. `state`: the folder for files of its sandboxes. `bases`: gives an image's folder.
    `warm`: machines that are kept ready for each kind of base that was opened; they have run nothing.
    `proxy`: makes a sandbox's way to the network."""

    state: Path | None = None
    bases: Callable[[str], Path] | None = None
    warm: int = 1
    place: cgroups.Place = field(default_factory=cgroups.here)
    proxy: MakeProxy = proxy_of
    name = "bubblewrap"

    def __post_init__(self) -> None:
        self._state = self.state or owners.default_state()
        self._owner: owners.Owner | None = None
        self._numbers = itertools.count()
        self._open: set[BubblewrapSandbox] = set()
        self._warm: defaultdict[Plan, list[Place]] = defaultdict(list)
        self._filling: dict[asyncio.Task[None], Plan] = {}
        self._beginning = asyncio.Lock()
        self._etc = Path()

    @property
    def capabilities(self) -> frozenset[Capability]:
        found = {Capability.sessions, Capability.snapshot, Capability.fork}
        if self.bases is not None and _overlay_possible():
            found.add(Capability.own_rootfs)
        if gateway.possible():
            found.add(Capability.network)
        return frozenset(found)

    @property
    def memory_by(self) -> str:
        """Who limits the memory of a sandbox: cgroup v1, cgroup v2 or watchdog."""
        return self.place.memory_by

    async def open(
        self, base: Base, limits: Limits, network: Network = NO_NETWORK, *, snapshot: Snapshot | None = None
    ) -> BubblewrapSandbox:
        plan = self._plan(base, limits, network, snapshot)
        async with self._beginning:
            if self._owner is None:
                await self.reap()
                await asyncio.to_thread(self._begin)
        place = await self._take(plan)
        try:
            return await self._opened(place, base, limits, network, snapshot)
        except OSError as error:
            await place.remove()
            raise _untold("cannot open a sandbox", error) from None
        except BaseException:
            await place.remove()
            raise
        finally:
            self._refill(plan)

    async def _opened(
        self, place: Place, base: Base, limits: Limits, network: Network, snapshot: Snapshot | None
    ) -> BubblewrapSandbox:
        ends = time.monotonic() + limits.seconds
        if snapshot is not None:
            if place.machine is not None and place.plan.lower is not None:
                await place.machine.kill()
                place.machine = None
            await asyncio.to_thread(put_back, place.plan, Path(snapshot.key), place.folder, place.number)
        elif base.tree is not None:
            await asyncio.to_thread(folders.fill, base.tree, place.folder / "work", place.number)
        machine = place.machine or await place.boot()
        way = Gateway(self.proxy(network, place.name), GATE) if network.allow else None
        environment = {**ENVIRONMENT, **(way.environment if way else {}), **base.environment}
        inside = Inside(machine.channel, environment, WORKSPACE, limits.output_bytes, ends, place.counts)
        await set_limits(inside, limits, place)
        if way is not None:
            way.write(place.folder / "gate")
            await way.open(machine.channel)
        sandbox = BubblewrapSandbox(place, inside, limits, base, self._open.discard, way)
        self._open.add(sandbox)
        return sandbox

    async def reap(self) -> int:
        return await asyncio.to_thread(_reap, self._state)

    async def close(self) -> None:
        for task in list(self._filling):
            task.cancel()
        await asyncio.gather(*list(self._filling), return_exceptions=True)
        warm = [place for places in self._warm.values() for place in places]
        self._warm.clear()
        await asyncio.gather(*(one.close() for one in list(self._open)), *(place.remove() for place in warm))
        if self._owner is not None:
            for folder in (self._etc, self._etc.with_name(CODE)):
                folders.remove(folder)
            self._owner.remove()
            self._owner = None

    def _plan(self, base: Base, limits: Limits, network: Network, snapshot: Snapshot | None) -> Plan:
        """Raises ValueError for what this adapter does not have."""
        gateway.check(network)
        if min(limits.memory_mb, limits.disk_mb, limits.processes, limits.seconds) <= 0:
            raise ValueError(f"limits: found {limits}; allowed: numbers above 0")
        if snapshot is not None and not any(
            Path(snapshot.key).parent == one._place.folder / "snapshots" for one in self._open
        ):
            raise ValueError(f"snapshot: found {snapshot.key!r:.200}; allowed: one of a sandbox that is open here")
        lower = None
        if base.image:
            if self.bases is None or not base.image.startswith("base:"):
                raise ValueError(
                    f"image: found {base.image!r:.200}; allowed: base:<digest> where bases are set up, or none"
                )
            lower = self.bases(base.image).absolute()
        mounts = tuple((source.absolute(), target) for source, target in base.mounts)
        return Plan(lower, lower is None or base.tree is not None, mounts, bool(network.allow))

    def _begin(self) -> None:
        """Raises SandboxUnavailable, OSError."""
        bubblewrap.program()
        bubblewrap.runtime()  # asks for the interpreter's libraries once, which takes its time
        owners.runs_programs(self._state)
        self._owner = owners.Owner(self._state)
        self._etc = self._owner.folder / "etc"
        self._etc.mkdir()
        for name, text in _ETC.items():
            (self._etc / name).write_text(text)
        bubblewrap.compiled(self._etc.with_name(CODE))

    async def _take(self, plan: Plan) -> Place:
        while self._warm[plan]:
            place = self._warm[plan].pop()
            if place.machine is not None and place.machine.alive:
                return place
            await place.remove()
        return await self._made(plan)

    async def _made(self, plan: Plan) -> Place:
        """Make a place with a running machine. Raises SandboxUnavailable."""
        assert self._owner is not None
        number = next(self._numbers)
        place = Place(f"{self._owner.name}-{number}", self._owner.folder / str(number), plan, self._etc)
        making = asyncio.create_task(asyncio.to_thread(self._furnish, place))
        try:
            await asyncio.shield(making)
            await place.boot()
        except BaseException as error:
            await asyncio.wait({making})  # a thread cannot be stopped
            await place.remove()
            if isinstance(error, OSError):
                raise _untold("cannot make a sandbox", error) from None
            raise
        return place

    def _furnish(self, place: Place) -> None:
        """Raises OSError, SandboxUnavailable."""
        place.folder.mkdir(mode=0o711)
        groups = cgroups.folders(self.place, place.name)
        (place.folder / _GROUPS).write_text("".join(f"{group}\n" for group in groups))
        if groups:
            place.group = cgroups.Group(self.place, place.name)
        if os.geteuid() == 0:
            place.uid = owners.Uid()
        if place.plan.gate:
            (place.folder / "gate").mkdir(mode=0o755)
        for name in (*place.plan.written, *(("over",) if place.plan.lower else ())):
            folder = place.folder / name
            folder.mkdir(mode=0o755)
            if place.number is not None:
                os.chown(folder, place.number, place.number)

    def _refill(self, plan: Plan) -> None:
        """Start a machine for the next opening, while nobody waits for it."""
        if len(self._warm[plan]) + list(self._filling.values()).count(plan) < self.warm:
            task = asyncio.create_task(self._fill(plan))
            self._filling[task] = plan
            task.add_done_callback(self._filling.pop)

    async def _fill(self, plan: Plan) -> None:
        await asyncio.sleep(_REFILL_S)
        with contextlib.suppress(SandboxUnavailable):
            place = await self._made(plan)
            self._warm[plan].append(place)
            assert place.machine is not None
            await place.machine.channel.ask({"do": "prepare", "env": ENVIRONMENT, "cwd": WORKSPACE})


def _untold(what: str, error: OSError) -> SandboxUnavailable:
    hint = namespaces.hint(str(error))
    return SandboxUnavailable(f"{what}: {error}{f'; {hint}' if hint else ''}")


def _overlay_possible() -> bool:
    """An overlay in a user namespace needs Linux 5.11; for root, whose bases are shown as another user's, 5.19."""
    version = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    return version >= ((5, 19) if os.geteuid() == 0 else (5, 11))


def _reap(state: Path) -> int:
    count = 0
    for owner in owners.dead(state):
        for folder in sorted(path for path in owner.iterdir() if path.is_dir()):
            with contextlib.suppress(OSError):
                cgroups.end(Path(line) for line in (folder / _GROUPS).read_text().splitlines())
                count += 1
            folders.remove(folder)
    owners.forget_uids()
    return count
