"""The standard streams of a program in a pod as one byte stream, over the websocket of an exec request.

A message's first byte names its channel (protocol v4.channel.k8s.io): 0 input, 1 output, 2 errors, 3 the program's end as JSON.
`read` takes messages when it is asked, so that a slow reader slows the writer down, and nothing piles up here.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

_INPUT, _OUTPUT, _ERRORS, _END = 0, 1, 2, 3
_CHUNK = 32 << 10  # of input in one message, as client-go writes; servers refuse messages that are too long
_KEPT = 4096  # of what the program wrote to its standard error


class ExecStream:
    """Read and write like asyncio's streams do. `socket`: an aiohttp websocket."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._in, self._out = bytearray(), bytearray()
        self._ended = False
        self._sending = asyncio.Lock()
        self._closing: asyncio.Task[Any] | None = None
        self.errors = ""  # the last that the program wrote to its standard error, and how it ended

    async def read(self, most: int) -> bytes:
        """Return at least one byte, at most `most`; empty: the program or the connection has ended."""
        while not self._in and not self._ended:
            await self._fill()
        taken = bytes(self._in[:most])
        del self._in[:most]
        return taken

    async def line(self, most: int) -> bytes:
        """Return the next line with its end. Raises ConnectionError where none comes within `most` bytes."""
        while (end := self._in.find(b"\n")) < 0:
            if self._ended or len(self._in) > most:
                raise ConnectionError(self.errors.strip() or "the program ended before it answered")
            await self._fill()
        taken = bytes(self._in[: end + 1])
        del self._in[: end + 1]
        return taken

    def write(self, data: bytes) -> None:
        self._out += data

    async def drain(self) -> None:
        """Raises ConnectionError where the connection has ended."""
        async with self._sending:
            while self._out:
                part = bytes(self._out[:_CHUNK])
                del self._out[:_CHUNK]
                await self._socket.send_bytes(bytes([_INPUT]) + part)

    def is_closing(self) -> bool:
        return self._closing is not None or bool(self._socket.closed)

    def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._socket.close())

    async def wait_closed(self) -> None:
        if self._closing is not None:
            with contextlib.suppress(Exception):
                await self._closing

    async def _fill(self) -> None:
        import aiohttp

        message = await self._socket.receive()
        if message.type == aiohttp.WSMsgType.ERROR:
            self._say(str(message.data))
        if message.type not in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
            self._ended = True
            return
        data = message.data if isinstance(message.data, bytes) else message.data.encode("utf-8", "surrogateescape")
        channel, data = data[:1], data[1:]
        if channel == bytes([_OUTPUT]):
            self._in += data
        elif channel in (bytes([_ERRORS]), bytes([_END])):
            self._say(data.decode(errors="replace"))

    def _say(self, text: str) -> None:
        self.errors = (self.errors + text)[-_KEPT:]
