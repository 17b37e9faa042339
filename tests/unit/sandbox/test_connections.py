"""Connections from inside a sandbox, over a real loop and its channel, to a proxy that is a function of the test."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from shared.sandbox.channel import Channel
from shared.sandbox.gateway import Connection, Gateway
from shared.sandbox.inside import connections
from tests.patience import quiet

Serve = Callable[[Connection], Awaitable[None]]
DATA = bytes(range(256)) * 20_000


class Proxy:
    """`serve` closes what a connection leaves open, as the real one does."""

    certificates, decisions = b"", ()

    def __init__(self, act: Serve) -> None:
        self._act = act

    async def serve(self, reader: Connection, writer: Connection) -> None:
        with contextlib.suppress(ConnectionError):
            await self._act(reader)
        writer.close()

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def listening(act: Serve) -> AsyncIterator[int]:
    """The port of a loop that carries connections to `act`."""
    command = [sys.executable, "-m", "shared.sandbox.inside.loop", '{"namespaces": false}']
    loop = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert loop.stdin is not None
    assert loop.stdout is not None
    channel = Channel(loop.stdout, loop.stdin)
    proxy: Any = Proxy(act)
    gateway = Gateway(proxy, "/nowhere")
    try:
        async with asyncio.timeout(120):
            await channel.ready
            yield await gateway.open(channel, 0)
    finally:
        await gateway.close()
        await channel.close()
        await loop.wait()


async def answers_at_the_end(connection: Connection) -> None:
    data = b""
    while part := await connection.read(1 << 16):
        data += part
    connection.write(data[::-1])
    await connection.drain()


async def asked(port: int, data: bytes = DATA) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    got = await reader.read()
    writer.close()
    return got


def test_many_connections_carry_much_in_both_directions_and_the_end_of_each() -> None:
    async def scenario() -> None:
        async with listening(answers_at_the_end) as port:
            assert await asyncio.gather(*(asked(port) for _ in range(5))) == [DATA[::-1]] * 5
            left = await asyncio.open_connection("127.0.0.1", port)
            left[1].close()  # a client that says nothing holds nobody up
            assert await asked(port) == DATA[::-1]

    asyncio.run(scenario())


def test_a_proxy_that_ends_ends_its_client_and_no_other() -> None:
    async def refuses(connection: Connection) -> None:
        if (first := await connection.read(1)) == b"x":
            connection.write(b"no")
            await connection.drain()
            return
        while part := await connection.read(1 << 16):
            first += part
        connection.write(first[::-1])
        await connection.drain()

    async def scenario() -> None:
        async with listening(refuses) as port:
            other, writing = await asyncio.open_connection("127.0.0.1", port)
            writing.write(b"y12")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x")
            assert await reader.read() == b"no"
            writing.write_eof()
            assert await other.read() == b"21y"
            writer.close()
            writing.close()

    asyncio.run(scenario())


def test_a_proxy_that_writes_its_last_reads_on() -> None:
    got: list[bytes] = []

    async def half(connection: Connection) -> None:
        connection.write(b"all")
        await connection.drain()
        connection.write_eof()
        while part := await connection.read(1 << 16):
            got.append(part)

    async def scenario() -> None:
        async with listening(half) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b"all"
            writer.write(b"more")
            await writer.drain()
            writer.write_eof()
            assert await reader.read() == b""
            while b"".join(got) != b"more":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(scenario())


def test_a_client_that_takes_nothing_holds_up_no_other() -> None:
    async def floods(connection: Connection) -> None:
        if await connection.read(1) == b"f":
            while True:
                connection.write(bytes(1 << 20))
                await connection.drain()
        await answers_at_the_end(connection)

    async def scenario() -> None:
        async with listening(floods) as port:
            _, deaf = await asyncio.open_connection("127.0.0.1", port)
            deaf.write(b"f")
            await deaf.drain()
            assert await asked(port, b"x" + DATA) == DATA[::-1]
            deaf.transport.abort()

    asyncio.run(scenario())


def test_a_client_that_vanishes_ends_its_connection() -> None:
    ended = asyncio.Semaphore(0)

    async def told(connection: Connection) -> None:
        with contextlib.suppress(ConnectionError):
            while await connection.read(1 << 16):
                pass
        ended.release()

    async def scenario() -> None:
        async with listening(told) as port:
            for _ in range(10):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"x")
                await writer.drain()
                writer.transport.abort()
            for _ in range(10):
                await ended.acquire()

    asyncio.run(scenario())


def test_connections_over_the_most_wait_for_a_place() -> None:
    held: list[Connection] = []
    release = asyncio.Event()

    async def holds(connection: Connection) -> None:
        held.append(connection)
        await release.wait()
        await answers_at_the_end(connection)

    async def scenario() -> None:
        async with listening(holds) as port:
            asking = [asyncio.create_task(asked(port, b"12")) for _ in range(connections.MOST + 20)]
            while len(held) < connections.MOST:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await quiet(0.2, "a connection over the most is served")
            assert len(held) == connections.MOST
            release.set()
            assert await asyncio.gather(*asking) == [b"21"] * (connections.MOST + 20)

    asyncio.run(scenario())


def test_a_loop_has_one_door() -> None:
    async def scenario() -> None:
        command = [sys.executable, "-m", "shared.sandbox.inside.loop", '{"namespaces": false}']
        loop = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert loop.stdin is not None
        assert loop.stdout is not None
        channel = Channel(loop.stdout, loop.stdin)
        async with asyncio.timeout(60):
            await channel.ready
            await channel.ask({"do": "listen", "port": 0})
            with pytest.raises(ValueError, match="allowed: one"):
                await channel.ask({"do": "listen", "port": 0})
        await channel.close()
        await loop.wait()

    asyncio.run(scenario())
