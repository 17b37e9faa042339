"""Connections as the proxy sees them, whatever carries them: a socket, a pipe, a channel of an adapter.

Invariants:
- Every byte to or from the sandbox is counted before it goes further.
- Every transfer moves the idle deadline of its connection; nothing else does.
- Memory per connection is bounded: a write waits until the other side has taken it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from shared.sandbox.egress.policy import Refused

CHUNK = 1 << 16
Found = TypeVar("Found")


class Reader(Protocol):
    """A part of asyncio.StreamReader."""

    async def read(self, most: int) -> bytes:
        """Return at most `most` bytes; empty: the other side wrote its last."""


class Writer(Protocol):
    """A part of asyncio.StreamWriter."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    def can_write_eof(self) -> bool: ...

    def write_eof(self) -> None: ...

    def close(self) -> None: ...


class Stream(Protocol):
    async def read(self) -> bytes:
        """Return what came; empty: the other side wrote its last."""

    async def write(self, data: bytes) -> None: ...

    def ahead(self, data: bytes) -> None:
        """Have the next reads return these data first."""

    async def end(self) -> None:
        """Say that nothing more will be written, where the stream can say so. Raises nothing."""


def _nothing(count: int) -> None:
    pass


class PlainStream:
    """A reader and a writer. `received` and `sent` are told how many bytes went by."""

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        moved: Callable[[], None],
        received: Callable[[int], None] = _nothing,
        sent: Callable[[int], None] = _nothing,
    ) -> None:
        self._reader, self._writer, self._moved = reader, writer, moved
        self._received, self._sent, self._ahead = received, sent, b""

    async def read(self) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        data = await self._reader.read(CHUNK)
        self._moved()
        self._received(len(data))
        return data

    async def write(self, data: bytes) -> None:
        self._sent(len(data))
        self._writer.write(data)
        await self._writer.drain()
        self._moved()

    def ahead(self, data: bytes) -> None:
        self._ahead = data + self._ahead

    async def end(self) -> None:
        if self._writer.can_write_eof():
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.write_eof()

    def drop(self) -> None:
        """Close at once. Data that the other side has not taken yet are lost: it may never take them."""
        self._writer.close()
        transport = getattr(self._writer, "transport", None)
        if transport is not None:
            transport.abort()


class TlsStream:
    """The server's side of TLS over another stream, of which the first bytes may have been read already."""

    def __init__(self, inner: PlainStream, context: ssl.SSLContext) -> None:
        self._inner, self._ahead = inner, b""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)

    async def handshake(self) -> None:
        """Raises ssl.SSLError where the client does not accept the certificate."""
        await self._until(self._tls.do_handshake)

    async def read(self) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        try:
            return await self._until(lambda: self._tls.read(CHUNK))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""

    async def write(self, data: bytes) -> None:
        # Without renegotiation a write never waits for a read, so one task may read while another writes.
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        await self._flush()

    def ahead(self, data: bytes) -> None:
        self._ahead = data + self._ahead

    async def end(self) -> None:
        with contextlib.suppress(OSError, ValueError, Refused):
            with contextlib.suppress(ssl.SSLWantReadError):  # the client's own farewell is not waited for
                self._tls.unwrap()
            await self._flush()

    async def _until(self, act: Callable[[], Any]) -> Any:
        while True:
            try:
                found = act()
            except ssl.SSLWantReadError:
                await self._flush()
                data = await self._inner.read()
                if data:
                    self._in.write(data)
                else:
                    self._in.write_eof()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    await self._flush()  # the alert that says what was wrong
                raise
            else:
                await self._flush()
                return found

    async def _flush(self) -> None:
        if data := self._out.read():
            await self._inner.write(data)


async def run_with(main: Coroutine[Any, Any, Found], background: Coroutine[Any, Any, None]) -> Found:
    """Run both. When `main` ends, cancel `background` and return. When either raises, end both and raise its error."""
    first, second = tasks = asyncio.create_task(main), asyncio.create_task(background)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            second.result()
        return await first
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def relay(client: Stream, server: PlainStream) -> None:
    """Copy both ways until the server has written its last."""

    async def up() -> None:
        while data := await client.read():
            await server.write(data)
        await server.end()

    async def down() -> None:
        while data := await server.read():
            await client.write(data)

    await run_with(down(), up())
