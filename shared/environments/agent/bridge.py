"""The way from an agent inside a sandbox to the model, without a network.

    agent ── 127.0.0.1:PORT ── inside/bridge.py ── pipes of the sandbox ── Bridge ── connect() ── endpoint

Invariant: only connections that `connect` opens are reached; the sandbox has no other way out through the bridge.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Coroutine
from typing import Any

from shared.environments import Connect, InfrastructureError
from shared.environments.repository import runtime
from shared.sandbox.contract import Program, Sandbox

PORT = 3129
PROGRAM = f"{runtime.HOME}/inside/bridge.py"
_HEAD = struct.Struct(">II")
_CHUNK = 1 << 16
_LONGEST = 1 << 20  # bytes of a frame; the program inside writes shorter ones
_READY_S = 60.0


class Bridge:
    """Use as an async context manager. `python`: the interpreter of the sandbox."""

    def __init__(self, sandbox: Sandbox, connect: Connect, python: str) -> None:
        self._sandbox, self._connect, self._python = sandbox, connect, python
        self._program: Program | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Bridge:
        """Raises InfrastructureError where the program inside does not listen, SandboxUnavailable."""
        self._program = await self._sandbox.spawn([self._python, "-I", "-S", PROGRAM, str(PORT)])
        said = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_READY_S):
                while not said.endswith(b"\n") and (more := await self._program.receive(64)):
                    said += more
        if said != b"ready\n":
            await self._program.kill()
            raise InfrastructureError(
                f"the bridge inside the sandbox does not listen on port {PORT}: it said {said!r:.80}"
            )
        self._start(self._read(self._program))
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers.values():
            writer.close()
        if self._program is not None:
            await self._program.kill()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, program: Program) -> None:
        held = b""
        while data := await program.receive(_CHUNK):
            held += data
            while len(held) >= _HEAD.size:
                number, length = _HEAD.unpack_from(held)
                if length > _LONGEST:  # code inside may have taken the program's place
                    return await program.kill()
                if len(held) < _HEAD.size + length:
                    break
                payload, held = held[_HEAD.size : _HEAD.size + length], held[_HEAD.size + length :]
                await self._outwards(program, number, payload)

    async def _outwards(self, program: Program, number: int, data: bytes) -> None:
        if not data:
            if (writer := self._writers.pop(number, None)) is not None:
                writer.close()
            return
        if number not in self._writers:
            reader, self._writers[number] = await self._connect()
            self._start(self._inwards(program, number, reader))
        with contextlib.suppress(ConnectionError):
            self._writers[number].write(data)
            await self._writers[number].drain()

    async def _inwards(self, program: Program, number: int, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                await program.send(_HEAD.pack(number, len(data)) + data)
            await program.send(_HEAD.pack(number, 0))
