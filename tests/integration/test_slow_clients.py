"""Clients that read nothing, or send their request byte by byte: they keep no row, no id and no drain. With the embedded engine
and with SGLang's stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from services.inference import limits
from services.inference.errors import errors
from services.inference.service import Inference
from tests.integration import engine_platform
from tests.integration.engine_platform import Platform, ask, body_of
from tests.integration.sglang_world import World
from tests.patience import eventually, patient

SHORT_S = 0.5
Test = Callable[[Inference], Awaitable[None]]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STALL_S", SHORT_S)


def speaking(p: Platform, monkeypatch: pytest.MonkeyPatch) -> tuple[World, dict[str, Any]]:
    """The stand-in that streams, at once and without end."""
    world = World(p, monkeypatch)
    script = p.state / "speaking"
    stand_in = Path(__file__).with_name("speaking_sglang.py")
    code = f"import sys, runpy; sys.path.insert(0, {str(stand_in.parent)!r}); import fake_sglang; fake_sglang.TOKEN_S = 0; "
    code += f"sys.argv[0] = {str(stand_in)!r}; runpy.run_path({str(stand_in)!r}, run_name='__main__')"
    runner = p.state / "speaking.py"
    runner.write_text(code)
    script.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{runner}" "$@"\n')
    script.chmod(0o755)
    world.wrong(say=[1] * 70_000)
    return world, {"sglang_python": str(script)}


@pytest.fixture(params=["embedded", "sglang"])
def serving(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Test], None]:
    def serve(test: Test) -> None:
        async def go(p: Platform) -> None:
            await p.start_run()
            if request.param == "embedded":
                context: Any = p.replica(context=60_000)
            else:
                world, changes = speaking(p, monkeypatch)
                context = world.replica(context=60_000, **changes)
            async with context as replica:
                await p.applied(0)
                await test(replica)

        engine_platform.run(go, tmp_path)

    return serve


def connect(url: str) -> socket.socket:
    """With little room for what it does not read."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    address = urlsplit(url)
    plain.connect((address.hostname, address.port))
    plain.setblocking(False)
    return plain


def narrow(replica: Inference) -> bool:
    """Little room on the way to each client, too. Whether there is a client."""
    connections = replica.health._runner.server.connections  # type: ignore[union-attr]
    for connection in connections:
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return bool(connections)


def head(path: str, size: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()
    )


def test_a_client_that_never_reads_its_stream_is_cut_off_and_its_row_and_id_are_free(serving):
    async def test(replica: Inference) -> None:
        url, server = replica.health.url, replica.server
        body = json.dumps(body_of([1, 2, 3], 50_000, stream=True, rid="mine")).encode()
        deaf = connect(url)
        with contextlib.closing(deaf):
            await eventually(lambda: narrow(replica))
            await asyncio.get_running_loop().sock_sendall(deaf, head("/generate", len(body)) + body)
            await eventually(lambda: not server.idle.is_set())
            await eventually(server.idle.is_set)
            if replica.settings.engine == "embedded":
                await eventually(lambda: server.engine.running == 0)
                status, _ = await ask(url, "/generate", body_of([1, 2, 3], 2, rid="mine"))
                assert status == 200
        assert (await ask(url, "/readyz"))[0] == 200

    serving(test)


def test_a_body_that_comes_byte_by_byte_is_refused_after_a_while_and_nobody_waits_for_it(serving):
    async def test(replica: Inference) -> None:
        url, loop = replica.health.url, asyncio.get_running_loop()
        with contextlib.closing(connect(url)) as slow:
            await loop.sock_sendall(slow, head("/generate", 1000))
            answer = b""

            async def trickle() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        await loop.sock_sendall(slow, b" ")
                        await asyncio.sleep(SHORT_S / 10)

            sending = asyncio.create_task(trickle())
            assert (await ask(url, "/generate", body_of([1, 2, 3], 2)))[0] == 200
            async with asyncio.timeout(patient(30)):
                with contextlib.suppress(ConnectionError):
                    while part := await loop.sock_recv(slow, 4096):  # until the connection is closed
                        answer += part
            sending.cancel()
        assert answer.startswith(b"HTTP/1.1 408 ")
        message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert "request body" in message
        assert f"{SHORT_S:g} s" in message
        assert replica.server.idle.is_set()

    serving(test)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_failure_of_the_replica(serving, caplog):
    async def test(replica: Inference) -> None:
        with contextlib.closing(connect(replica.health.url)) as gone:
            await asyncio.get_running_loop().sock_sendall(gone, head("/generate", 1000) + b"{")
            await eventually(lambda: replica.health._runner.server.connections)  # type: ignore[union-attr]
        await eventually(lambda: not replica.health._runner.server.connections)  # type: ignore[union-attr]
        assert not caplog.records

    serving(test)


def test_a_body_that_is_too_large_is_refused_in_json_with_what_is_allowed(serving, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BODY", 1 << 16)

    async def test(replica: Inference) -> None:
        for path in ("/generate", "/v1/chat/completions", "/abort_request"):
            status, answer = await ask(replica.health.url, path, {"text": "x" * (1 << 17)})
            assert status == 413
            assert all(word in answer["error"]["message"] for word in ("request body", "131", "allowed: 65536"))
        chunked = (b"x" * 40_000 for _ in range(3))  # its size is not told before
        assert await upload(replica.health.url, chunked) == 413

    serving(test)


def test_a_body_that_is_no_gzip_is_the_clients_mistake(serving):
    async def test(replica: Inference) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{replica.health.url}/generate",
                data=b"{}",
                headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
            ) as response,
        ):
            assert response.status == 400
            assert "request body" in (await response.json())["error"]["message"]

    serving(test)


async def upload(url: str, parts: Any) -> int:
    async def all_of() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", data=all_of()) as response:
        assert "request body" in (await response.json())["error"]["message"]
        return response.status


def test_an_answer_that_nobody_reads_holds_no_shutdown(monkeypatch):
    """A whole answer, not a stream: it is written after the handler."""
    monkeypatch.setattr(limits, "SLOWEST", 1 << 40)

    async def large(_: web.Request) -> web.Response:
        return web.Response(body=bytes(32 << 20))

    async def go() -> None:
        app = web.Application(middlewares=[errors])
        app.add_routes([web.post("/large", large)])
        runner = web.AppRunner(app, shutdown_timeout=3600)  # with somebody to wait for, it would hold the test up
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        with contextlib.closing(connect(f"http://127.0.0.1:{port}")) as deaf:
            await asyncio.get_running_loop().sock_sendall(deaf, head("/large", 0))
            assert runner.server is not None
            await eventually(lambda: runner.server.connections)
            await eventually(lambda: not runner.server.connections)
            await runner.cleanup()

    asyncio.run(go())
