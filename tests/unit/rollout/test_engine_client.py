"""The client of one replica: what its answer to a probe means."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from services.rollout.engine_client import EngineClient


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
        app = web.Application()
        app.add_routes([web.get("/health", health)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            async with EngineClient(generate_s=5.0, probe_s=5.0) as client:
                assert await client.alive(f"http://127.0.0.1:{port}") is lives
        finally:
            await runner.cleanup()

    asyncio.run(story())
