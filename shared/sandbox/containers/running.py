"""A container whose loop is ready, with its channel and what watches its disk."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from shared.sandbox import SandboxUnavailable
from shared.sandbox.channel import Channel, Counts, Inside
from shared.sandbox.containers import layers, machine
from shared.sandbox.containers.disk import Disk
from shared.sandbox.containers.engine import Engine
from shared.sandbox.contract import Limits
from shared.sandbox.gateway import Gateway

READY_S = 120.0  # a starved machine takes its time


class ContainerChannel(Channel):
    """Remembers what the kernel has counted, which every answer to a script tells. `free`: bytes of the engine's disk."""

    counted, free = Counts(), 0

    async def ask(
        self, head: dict[str, Any], blob: bytes = b"", *, wait_s: float = 20.0
    ) -> tuple[dict[str, Any], bytes]:
        answer, data = await super().ask(head, blob, wait_s=wait_s)
        if "forks" in answer:
            self.counted = Counts(int(answer["memory"]), int(answer["forks"]))
            self.free = int(answer["free"])
        return answer, data


class Held(Protocol):
    """What keeps a container or a pod alive."""

    async def close(self) -> None:
        """Remove it. Repeating it does nothing."""

    async def diagnosis(self) -> tuple[bool, str]:
        """After its end: return whether its memory limit ended it, and a text for people."""


class Running:
    """A container or a pod whose loop is ready, and its channel. `born`: on the monotonic clock."""

    def __init__(self, held: Held, channel: ContainerChannel) -> None:
        self.machine, self.channel, self.born = held, channel, time.monotonic()
        self.inside: Inside | None = None  # None: it waits in the pool
        self.disk: Disk | None = None
        self.way: Gateway | None = None

    async def begin(
        self,
        limits: Limits,
        environment: Mapping[str, str],
        workdir: str,
        tree: Path | None,
        layer: IO[bytes] | None,
        *,
        mounts: Sequence[Path] = (),
        watched: bool = False,
        way: Gateway | None = None,
    ) -> None:
        """Set what a sandbox begins with, and its limits. `mounts`: folders that the loop, not the engine, mounts. `watched`: the
        loop watches the memory and the kernel counts processes by their user. `way`: to the network; where it has
        certificates, they are the last mount. Raises SandboxUnavailable, ValueError."""
        self.way = way
        await self.channel.ask({"do": "until", "seconds": limits.seconds + machine.LAST_S})
        if tree is not None:
            await layers.fill(self.channel, tree)
        for number, folder in enumerate(mounts):
            await layers.fill(self.channel, folder, number)
        if way is not None and way.certificates:
            with tempfile.TemporaryDirectory() as certificates:
                way.write(Path(certificates))
                await layers.fill(self.channel, Path(certificates), len(mounts))
        if way is not None:
            await way.open(self.channel)
        size = await layers.mount(self.channel, layer=layer)
        ends = time.monotonic() + limits.seconds
        self.inside = Inside(
            self.channel, environment, workdir, limits.output_bytes, ends, counts=lambda: self.channel.counted
        )
        # The container's cgroup limits processes. The limit on a file is a backstop, also for one without a name in memory;
        # `Disk` and the cgroup are quicker.
        await self.inside.limit(
            processes=limits.processes + machine.OWN_PROCESSES if watched else 0,
            crowd=limits.processes + machine.OWN_PROCESSES,
            file_bytes=(limits.disk_mb + limits.memory_mb) << 20,
            memory_bytes=limits.memory_mb << 20 if watched else 0,
        )
        self.disk = Disk(self.inside, limits.disk_mb << 20)
        await self.disk.begin(size)

    async def close(self) -> None:
        if self.disk is not None:
            await self.disk.close()
        if self.way is not None:
            await self.way.close()
        await self.channel.close()
        await self.machine.close()


async def boot(found: Engine, plan: machine.Plan) -> Running:
    """Start a container and wait until its loop is ready. Raises SandboxUnavailable, ValueError."""
    started = await machine.start(found, plan)
    channel = ContainerChannel(started.stream, started.stream)  # type: ignore[arg-type] # reads and writes as they do
    try:
        async with asyncio.timeout(READY_S):
            await channel.ready
        return Running(started, channel)
    except BaseException as error:
        await channel.close()
        await started.close()
        if isinstance(error, TimeoutError):
            raise SandboxUnavailable(f"the loop in a container was not ready after {READY_S:g} s") from None
        if isinstance(error, SandboxUnavailable):
            _, why = await started.diagnosis()
            raise SandboxUnavailable(f"the loop in a container did not start: {why}") from None
        raise
