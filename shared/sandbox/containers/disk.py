"""The limit on what a sandbox writes, where the engine has no quota for a container's layer.

The loop watches the free space of the disk and tells when it falls; an errand then adds up what was written. Where the disk has
lost as much as the sandbox may still write, the loop stops everything inside until that is known. A sandbox over its limit loses
its sessions and programs, and its files stay. It is over by what it wrote in a hundredth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from shared.sandbox import SandboxUnavailable
from shared.sandbox.channel import ChannelProgram, Inside
from shared.sandbox.containers import layers
from shared.sandbox.contract import Cause, CommandResult

_LEAST_STEP = 4 << 20
_AGAIN_S = 0.5  # after a measurement that failed: a sandbox that is full of processes has no room for an errand
_STEPS = 4  # measure at the latest after this part of what is left: other sandboxes may delete meanwhile


class Disk:
    """`most`: bytes that the sandbox may have written."""

    def __init__(self, inside: Inside, most: int) -> None:
        self._inside, self._most = inside, most
        self._size = 0
        self._free = 0  # bytes of the disk when the loop began to watch
        self._alarm = _Alarm(inside, self)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def begin(self, size: int) -> None:
        self._task = asyncio.create_task(self._watch())
        await self.renew(size)

    async def renew(self, size: int) -> None:
        """Take account of files that were set back, of so many bytes."""
        self._size = size
        await self._set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def rang(self) -> None:
        self._news.set()

    async def judged(self, result: CommandResult, free: int) -> CommandResult:
        """Return a script's result, with the disk as the cause where the script failed at its limit. `free`: bytes of the disk
        when it ended."""
        failed = result.exit_code != 0 and result.cause in (Cause.exited, Cause.signalled, Cause.session_ended)
        if failed and self._size + max(0, self._free - free) >= self._most // 2:
            # Without room for an errand the script has ended with what it says itself.
            with contextlib.suppress(SandboxUnavailable, ConnectionError):
                await self._measure()
            if self._size >= self._most:
                return replace(result, cause=Cause.disk_limit)
        return result

    def _step(self) -> int:
        return max(_LEAST_STEP, (self._most - self._size) // _STEPS)

    async def _set(self) -> None:
        left = max(_LEAST_STEP, self._most - self._size)
        order = {"do": "disk", "id": self._alarm.number, "bytes": self._step(), "most": left}
        answer, _ = await self._inside.channel.ask(order)
        self._free = int(answer["free"])

    async def _watch(self) -> None:
        """Measure at every alarm while the sandbox lives. Until a measurement succeeds, the loop keeps too much writing stopped."""
        while self._inside.channel.alive:
            await self._news.wait()
            self._news.clear()
            try:
                before = self._size
                await self._measure()
                if self._size >= self._most and self._size > before:
                    await self._inside.strike(Cause.disk_limit)
                await self._set()
            except (SandboxUnavailable, ConnectionError, ValueError):
                await asyncio.sleep(_AGAIN_S)
                self._news.set()

    async def _measure(self) -> None:
        written = await layers.used(self._inside.channel)
        held, _ = await self._inside.channel.ask({"do": "held"})
        self._size = written + int(held["bytes"])


class _Alarm(ChannelProgram):
    """Takes the loop's frames."""

    def __init__(self, inside: Inside, disk: Disk) -> None:
        super().__init__(inside.channel)
        self._disk = disk

    @property
    def number(self) -> int:
        return self._number

    def wrote(self, data: bytes) -> None:
        self._disk.rang()
