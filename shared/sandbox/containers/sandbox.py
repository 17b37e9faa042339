"""A sandbox in a container of an engine or in a pod: `Sandbox` and `Session` of shared.sandbox.contract over the loop's channel.

Invariants:
- Whatever a sandbox writes lies in its container's own volume, in /dev/shm or in the memory of its processes. It ends with the
  container, and the container ends with the connection to its worker.
- A snapshot is set back when no process of before is alive, over folders that none of them has seen.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from shared.sandbox import SandboxUnavailable, archives, gateway
from shared.sandbox.channel import ChannelProgram, ChannelSession, Inside
from shared.sandbox.containers import layers
from shared.sandbox.containers.images import HOME
from shared.sandbox.containers.running import Running
from shared.sandbox.contract import Capability, Caps, Cause, Changes, CommandResult, Decision, Limits, Snapshot
from shared.sandbox.environment import QUIET

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    **QUIET,
}
CERTIFICATES = f"{HOME}/.etude-network"  # of the egress proxy: a folder that any image has room for
_DIGEST_BYTES = 1 << 28  # a longer file counts as changed
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot: the number under which its sandbox keeps it."""

    sandbox: ContainerSandbox
    number: int


class ContainerSession:
    """See shared.sandbox.contract.Session."""

    def __init__(self, sandbox: ContainerSandbox, session: ChannelSession) -> None:
        self._sandbox, self._running, self._session = sandbox, sandbox.running, session

    async def run(
        self,
        script: str,
        *,
        time_s: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
    ) -> CommandResult:
        began = time.monotonic()
        try:
            result = await self._session.run(script, time_s=time_s, env=env, cwd=cwd, stdin=stdin)
        except SandboxUnavailable as error:
            by_memory, why = await self._running.machine.diagnosis() if not self._running.channel.alive else (False, "")
            if by_memory:
                return CommandResult(None, Cause.memory_limit, b"", b"", time.monotonic() - began, fresh=True)
            raise SandboxUnavailable(f"{error}{'; ' + why if why and not self._sandbox.closed else ''}") from None
        assert self._running.disk is not None
        return await self._running.disk.judged(result, self._running.channel.free)

    async def close(self) -> None:
        await self._session.close()


class ContainerSandbox:
    """See shared.sandbox.contract.Sandbox. `begins`: what tells which snapshots fit: the base and its tree."""

    def __init__(self, owner: Opened, running: Running, begins: tuple[str, Path | None], most: int) -> None:
        self.running, self.begins = running, begins
        self._owner, self._most = owner, most
        self._numbers = itertools.count(1)
        self._base: list[archives.Line] | None = None
        self.closed = False

    @property
    def decisions(self) -> Sequence[Decision]:
        return self.running.way.decisions if self.running.way is not None else ()

    @property
    def inside(self) -> Inside:
        if self.closed or self.running.inside is None:
            raise SandboxUnavailable("the sandbox is closed; open another")
        return self.running.inside

    async def session(self) -> ContainerSession:
        return ContainerSession(self, await self._told(self.inside.session()))

    async def spawn(self, argv: Sequence[str]) -> ChannelProgram:
        return await self._told(self.inside.spawn(argv))

    async def put(self, archive: bytes, at: str = "") -> None:
        await self._told(self.inside.put(archive, at))

    async def get(self, paths: Sequence[str], caps: Caps = Caps()) -> bytes:
        return await self._told(self.inside.get(paths, caps))

    async def changes(self, caps: Caps = Caps()) -> Changes:
        inside = self.inside
        if self._base is None:
            self._base = await self._told(layers.base_lines(inside.channel))
        now = [line for line in await inside.scan(["."], _DIGEST_BYTES) if line.path]
        written, deleted, refused = archives.difference(self._base, now, caps)
        return Changes(await self.get(written, caps), deleted, refused)

    async def snapshot(self) -> Snapshot:
        number = next(self._numbers)
        size = await self._told(layers.keep(self.inside.channel, number))
        return Snapshot(self._owner.keep(Kept(self, number)), size)

    async def restore(self, snapshot: Snapshot) -> None:
        inside, kept = self.inside, self._owner.kept(snapshot, self.begins)
        layer = None if kept.sandbox is self else await kept.sandbox.give(kept.number)
        try:
            await inside.strike(Cause.session_ended)
            number = kept.number if kept.sandbox is self else None
            size = await self._told(layers.mount(inside.channel, kept=number, layer=layer))
        except BaseException:
            inside.channel.fail("a snapshot could not be set back; open another sandbox")
            raise
        finally:
            if layer is not None:
                layer.close()
        assert self.running.disk is not None
        await self.running.disk.renew(size)

    async def give(self, number: int) -> Any:
        """Return an archive of a snapshot of this sandbox."""
        return await self._told(layers.give(self.inside.channel, number, self._most))

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._owner.forget(self)
        await self.running.close()

    async def _told(self, work: Awaitable[T]) -> T:
        """Say why the container ended, where that is why the work failed."""
        try:
            return await work
        except SandboxUnavailable as error:
            if self.running.channel.alive or self.closed:
                raise
            _, why = await self.running.machine.diagnosis()
            raise SandboxUnavailable(f"{error}; {why}") from None


@dataclass(slots=True)
class Opened:
    """The open sandboxes of an adapter, and their snapshots."""

    sandboxes: set[ContainerSandbox] = field(default_factory=set)
    _kept: dict[str, Kept] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def keep(self, kept: Kept) -> str:
        key = f"layer-{next(self._numbers)}"
        self._kept[key] = kept
        return key

    def kept(self, snapshot: Snapshot, begins: tuple[str, Path | None]) -> Kept:
        """Return a snapshot. Raises ValueError where it is not one of an open sandbox that began with the same."""
        found = self._kept.get(snapshot.key)
        if found is None or found.sandbox.begins != begins:
            why = "its sandbox is closed" if found is None else "it belongs to another base"
            raise ValueError(
                f"snapshot: found {snapshot.key!r}; {why}; allowed: one of an open sandbox with the same base"
            )
        return found

    def forget(self, sandbox: ContainerSandbox) -> None:
        self.sandboxes.discard(sandbox)
        self._kept = {key: kept for key, kept in self._kept.items() if kept.sandbox is not sandbox}

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self.sandboxes)))


def capabilities() -> frozenset[Capability]:
    """Return what sandboxes in containers have."""
    network = {Capability.network} if gateway.possible() else set()
    return frozenset({Capability.own_rootfs, Capability.sessions, Capability.snapshot, Capability.fork, *network})


def check(limits: Limits) -> None:
    """Raises ValueError for limits below the least that a container needs."""
    for name, found, least in (
        ("memory_mb", limits.memory_mb, 32),
        ("disk_mb", limits.disk_mb, 1),
        ("processes", limits.processes, 1),
        ("seconds", limits.seconds, 1),
    ):
        if found < least:
            raise ValueError(f"limits: {name}: found {found}, allowed at least {least}")
