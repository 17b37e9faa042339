"""A container's standard input and output as one byte stream, over one connection to the engine.

The engine sends output in frames (stream number, length, bytes). `Stream.read` takes them apart when they are asked for, so
that a slow reader slows the writer down, and nothing piles up here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import threading
from typing import Any

from shared.sandbox.containers.engine import Engine

_HEAD = struct.Struct(">BxxxI")  # stream, three zero bytes, length
_ERRORS = 2
_KEPT = 4096  # of what the container wrote to its standard error
_MOST = 1 << 20


class Stream:
    """Read and write like asyncio's streams do."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: object) -> None:
        self._reader, self._writer, self._keep = reader, writer, keep
        self._buffer, self._ended = bytearray(), False
        self.errors = ""  # the last that the container wrote to its standard error

    async def readexactly(self, count: int) -> bytes:
        """Return `count` bytes. Raises IncompleteReadError where the container has ended."""
        while len(self._buffer) < count:
            if not await self._fill():
                partial = bytes(self._buffer)
                self._buffer.clear()
                raise asyncio.IncompleteReadError(partial, count)
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def read(self, most: int) -> bytes:
        """Return at least one byte, at most `most`; empty: the container has ended."""
        if not self._buffer and not await self._fill():
            return b""
        taken = bytes(self._buffer[:most])
        del self._buffer[:most]
        return taken

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def is_closing(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _fill(self) -> bool:
        """Take one frame apart. Return False where the stream has ended."""
        while not self._ended:
            try:
                number, length = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
                data = await self._reader.readexactly(length)
            except (asyncio.IncompleteReadError, OSError):
                self._ended = True
                return False
            if number == _ERRORS:
                self.errors = (self.errors + data.decode(errors="replace"))[-_KEPT:]
            elif data:
                self._buffer += data
                return True
        return False


def attach(engine: Engine, container: str) -> tuple[socket.socket, object]:
    """Attach to a container that has not started. Blocks. Return a socket, and an object that must live as long.

    The engine closes the container's standard input when the socket closes: a container whose worker is killed notices.
    """
    wrapped: Any = engine.api.attach_socket(container, params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    raw = getattr(wrapped, "_sock", wrapped)
    if type(raw) is socket.socket:
        raw.settimeout(None)
        return raw, wrapped
    return _relayed(raw), wrapped  # TLS, SSH: asyncio cannot take these over


async def opened(connection: socket.socket, keep: object) -> Stream:
    connection.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=connection, limit=_MOST)
    return Stream(reader, writer, keep)


def _relayed(remote: ssl.SSLSocket | Any) -> socket.socket:
    """Return one end of a pair whose other end two threads connect with `remote`."""
    own, other = socket.socketpair()
    for end in (other, remote):  # a new socket has the process's default timeout
        end.settimeout(None)

    def copy(receive: Any, send: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := receive(1 << 16):
                send(data)
        for end in (other, remote):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR) if isinstance(end, socket.socket) else end.close()

    for arguments in ((remote.recv, other.sendall), (other.recv, remote.sendall)):
        threading.Thread(target=copy, args=arguments, daemon=True, name="sandbox-relay").start()
    return own
