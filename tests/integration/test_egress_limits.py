"""Limits of the egress proxy, and its life: over sockets, without a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("cryptography", reason="the network of sandboxes is an extra: etude[egress]")
pytest.importorskip("h11", reason="the network of sandboxes is an extra: etude[egress]")

from shared.sandbox.bubblewrap import interpreter
from shared.sandbox.contract import Decision
from shared.sandbox.egress import EgressLimits
from tests.integration.egress_world import World, listening, world

PYTHON = str(interpreter())


async def talk(path: Path, *parts: bytes, most: int = 1 << 20) -> bytes:
    """Send parts, each after an answer to the one before; return everything that came back until the end."""
    reader, writer = await asyncio.open_unix_connection(path)
    got = b""
    with contextlib.closing(writer):
        for part in parts:
            writer.write(part)
            got += await reader.read(most)
        with contextlib.suppress(OSError):
            while data := await reader.read(most):
                got += data
    return got


def get(made: World, path: str = "/", more: str = "", host: str = "good.test") -> bytes:
    where = f"{host}:{made.http}"
    return f"GET http://{where}{path} HTTP/1.1\r\nHost: {where}\r\n{more}\r\n".encode()


def with_limits(check: object, **limits: float) -> tuple[Decision, ...]:
    async def scenario() -> tuple[Decision, ...]:
        async with world() as made:
            proxy = made.proxy(EgressLimits(**limits))  # type: ignore[arg-type]
            async with listening(proxy.serve) as path, asyncio.timeout(patient(30)):
                await check(made, path)  # type: ignore[operator]
            await proxy.close()
            return proxy.decisions

    return asyncio.run(scenario())


def test_a_response_over_the_limit_of_bytes_is_cut_and_nothing_goes_after_it():
    async def check(made: World, path: Path) -> None:
        assert len(await talk(path, get(made, "/large"))) < 300_000
        assert b"hello" not in await talk(path, get(made))

    decisions = with_limits(check, bytes_down=200_000)
    assert "over the limit bytes_down: more than 200000 bytes received" in {
        one.why for one in decisions if not one.allowed
    }


def test_a_request_over_the_limit_of_bytes_reaches_no_server_whole():
    async def check(made: World, path: Path) -> None:
        body = b"x" * 100_000
        await talk(path, get(made, more=f"Content-Length: {len(body)}\r\n") + body)

    assert [one.why for one in with_limits(check, bytes_up=50_000) if not one.allowed] == [
        "over the limit bytes_up: more than 50000 bytes sent"
    ]


@pytest.mark.parametrize("sent", [b"", b"GET http://good.test/ HT", b"CONNECT good.test:443 HTTP/1.1\r\nA: "])
def test_a_slow_head_ends_at_its_limit(sent):
    async def check(made: World, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        got = await reader.read()  # it ends, though nothing more is sent
        assert got == b"" if not sent else b"408" in got
        writer.close()

    why = {one.why for one in with_limits(check, head_s=0.2, idle_s=0.5)}
    assert why == ({"over the limit head_s: the request's head took more than 0.2 s"} if sent else set())


def test_a_tunnel_that_says_nothing_ends_at_its_limit():
    async def check(made: World, path: Path) -> None:
        assert b"200" in await talk(
            path, f"CONNECT good.test:{made.https} HTTP/1.1\r\n\r\n".encode().replace(b"1.1", b"1.0")
        )

    assert "nothing came through the tunnel in 0.2 s" in with_limits(check, head_s=0.2)[0].why


def test_connections_requests_and_heads_have_limits():
    async def check(made: World, path: Path) -> None:
        idle = [await asyncio.open_unix_connection(path) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert b"over the limit connections: more than 3 at once" in await talk(path)
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.1)
        assert b"431" in await talk(path, get(made, more="A: " + "x" * 5000 + "\r\n"))
        assert b"hello" in await talk(path, get(made, more="Connection: close\r\n"))
        assert b"over the limit requests: more than 3" in await talk(path, get(made))
        assert b"over the limit requests: more than 3" in await talk(path, get(made))

    assert len(with_limits(check, connections=3, requests=3, head_bytes=4096)) == 3, "the list has an end, too"


def test_a_websocket_passes_within_the_same_rules():
    upgrade = (
        "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
    )

    async def check(made: World, path: Path) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(get(made, "/ws", upgrade) + b"early")
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(7) == b"<early>"
        writer.write(b"later")
        assert await reader.readexactly(7) == b"<later>"
        writer.close()
        assert b"403" in await talk(path, get(made, "/ws", upgrade, "other.test"))
        inner = get(made, "/ws", upgrade).replace(f"http://good.test:{made.http}".encode(), b"")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(f"CONNECT good.test:{made.http} HTTP/1.0\r\n\r\n".encode())
        assert b"200" in await reader.readuntil(b"\r\n\r\n")
        writer.write(inner)
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        writer.close()

    assert [one.allowed for one in with_limits(check)] == [True, False, True]


def test_a_closed_proxy_ends_its_connections_and_takes_no_more():
    async def scenario() -> None:
        async with world() as made:
            proxy = made.proxy()
            async with listening(proxy.serve) as path:
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(get(made))
                assert b"200" in await reader.readuntil(b"hello 0")
                await proxy.close()
                assert await reader.read() == b""
                assert await talk(path) == b""
                writer.close()
                await proxy.close()

    asyncio.run(scenario())
