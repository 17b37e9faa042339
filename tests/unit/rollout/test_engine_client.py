"""The client of one replica: what its answer to a probe means, and what holds while there is none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import psutil
import pytest
from aiohttp import web

from services.rollout.engine_client import UNREAD_S, EngineClient, EngineUnavailable, Request
from services.rollout.inference import LOOK_EVERY_S, PROBE_S, SILENT_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
REQUEST = Request("x", [1], temperature=1.0, max_new_tokens=1, stop_token_ids=(), cache_key=None, first_row=0)


@contextlib.asynccontextmanager
async def served(path: str, handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "lives"),
    [
        (200, b'{"alive": true, "serving": true}', True),
        (200, b'{"alive":true,"serving":false}', False),  # killed and back, without weights: it would say 503 to all
        (200, b"", True),  # a server that says nothing of it
        (200, b"[]", True),
        (503, b'{"alive": false}', False),
    ],
)
def test_a_replica_lives_that_has_weights_to_answer_with(status: int, body: bytes, lives: bool) -> None:
    async def health(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    async def story() -> None:
        async with served("/health", health) as url, EngineClient(probe_s=5.0) as client:
            assert await client.alive(url) is lives

    asyncio.run(story())


def test_a_stopped_replica_is_noticed_within_a_second() -> None:
    """It answered just before it was stopped, and was looked at just before its silence counted."""
    assert SILENT_S + LOOK_EVERY_S + PROBE_S + UNREAD_S < 1.0


@pytest.mark.parametrize("sent", [True, False])
def test_a_replica_is_not_silent_because_this_process_was_away_itself(
    monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    """With the answer unread, or the request not yet sent."""
    monkeypatch.setattr(
        "services.rollout.engine_client.UNREAD_S", 30.0
    )  # on a busy machine; it is over with the answer
    patience_s, asked, ended, ready = 1.0, threading.Event(), threading.Event(), threading.Event()
    where: list[str] = []

    async def health(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.sleep(0.1)
        return web.Response()

    async def other_side() -> None:
        async with served("/health", health) as url:
            where.append(url)
            ready.set()
            await asyncio.to_thread(ended.wait, 60)

    async def story() -> None:
        async with EngineClient(probe_s=patience_s) as client:
            probing = asyncio.create_task(client.alive(where[0]))
            await asyncio.sleep(0)
            while sent and not asked.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            time.sleep(patience_s + 0.2)  # noqa: ASYNC251  # as when it is starved, or reads megabytes of routing
            assert await probing

    server = threading.Thread(target=lambda: asyncio.run(other_side()))
    server.start()
    try:
        assert ready.wait(60)
        asyncio.run(story())
    finally:
        ended.set()
        server.join()


def own_socket(name: tuple[str, int]) -> socket.socket:
    """A copy of this process's socket with that address."""
    found = next(c.fd for c in psutil.Process().net_connections("tcp4") if c.laddr == name)
    return socket.fromfd(found, socket.AF_INET, socket.SOCK_STREAM)


@pytest.mark.skipif(sys.platform != "linux", reason="the options have other names elsewhere")
def test_a_generation_at_a_machine_that_vanished_ends_within_a_minute_by_the_kernels_own_questions() -> None:
    peers: list[tuple[str, int]] = []
    asked = asyncio.Event()

    async def generate(http: web.Request) -> web.Response:
        assert http.transport is not None
        peers.append(http.transport.get_extra_info("peername"))
        asked.set()
        await asyncio.Event().wait()
        return web.Response()

    async def story() -> None:
        async with served("/generate", generate) as url, EngineClient(probe_s=1.0) as client:
            asking = asyncio.create_task(client.generate(url, REQUEST, None))
            await asked.wait()
            with own_socket(peers[0]) as ours:
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                first, every, count = (
                    ours.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
            assert first + every * count < 60
            asking.cancel()

    asyncio.run(story())


@pytest.mark.parametrize(("status", "blameless"), [(408, True), (425, True), (500, False)])
def test_a_request_that_came_too_slowly_may_be_sent_again_and_is_no_fault_of_the_replica(
    status: int, blameless: bool
) -> None:
    async def generate(_: web.Request) -> web.Response:
        return web.Response(status=status)

    async def story() -> None:
        async with served("/generate", generate) as url, EngineClient(probe_s=1.0) as client:
            with pytest.raises(EngineUnavailable) as raised:
                await client.generate(url, REQUEST, None)
            assert (raised.value.blameless, raised.value.broke) == (blameless, not blameless)

    asyncio.run(story())


def test_a_connection_that_takes_too_long_is_no_fault_of_a_replica_that_the_probes_find() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        host, port = listening.getsockname()
        for _ in range(4):  # nobody takes them: its queue is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))

        async def story() -> None:
            async with EngineClient(probe_s=1.0) as client:
                with pytest.raises(EngineUnavailable) as raised:
                    await client.generate(f"http://{host}:{port}", REQUEST, None)
                assert (raised.value.blameless, raised.value.broke) == (True, False)

        asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        (b'{"steps": 7, "paused": false, "engine": "etude"}', 7),
        (b'{"steps": 7, "paused": true}', None),
        (b'{"engine": "sglang", "paused": false}', None),  # its keeper watches it
        (b"no answer of ours", None),
    ],
)
def test_an_engine_that_does_not_say_its_steps_or_was_paused_is_not_judged_by_them(
    body: bytes, steps: int | None
) -> None:
    async def info(_: web.Request) -> web.Response:
        return web.Response(body=body)

    async def story() -> None:
        async with served("/server_info", info) as url, EngineClient(probe_s=5.0) as client:
            assert await client.steps(url) == steps

    asyncio.run(story())
