"""Failures as HTTP answers, alike for every engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from services.inference.wire import BadRequest, Unavailable

RETRY_AFTER_S = "1"


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The client's mistakes become 400, what cannot be served now 503, with SGLang's body."""
    try:
        return await handler(request)
    except BadRequest as error:
        return web.json_response({"error": {"message": str(error), "type": "BadRequest"}}, status=400)
    except Unavailable as error:
        body = {"error": {"message": str(error), "type": "Unavailable"}}
        return web.json_response(body, status=503, headers={"Retry-After": RETRY_AFTER_S})
