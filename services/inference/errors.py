"""Answers on their way out, alike for every engine: failures as HTTP answers, and each written within its limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from services.inference.limits import TooSlow, answered
from services.inference.wire import BadRequest, Unavailable
from shared.foreign import foreign

RETRY_AFTER_S = "1"


class Foreign(BadRequest):
    """A page in somebody's browser would pause this engine, or end what it samples."""

    status = 403


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """The client's mistakes become 400 (403 what another site's page sent, 408 and 413 what came too slowly, and too much), what
    cannot be served now 503, with SGLang's body."""
    try:
        if request.method not in ("GET", "HEAD") and foreign(request.headers, request.host):
            raise Foreign("a page of another site sent this; nothing was done")
        return await answered(request, await handler(request))
    except BadRequest as error:
        response = web.json_response(refusal(error), status=error.status)
        if isinstance(error, TooSlow):  # what comes yet would be waited for once more
            response.force_close()
            await answered(request, response)
            if request.transport is not None:
                request.transport.close()
        return await answered(request, response)
    except Unavailable as error:
        body = {"error": {"message": str(error), "type": "Unavailable"}}
        return await answered(request, web.json_response(body, status=503, headers={"Retry-After": RETRY_AFTER_S}))


def refusal(error: BadRequest) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": "BadRequest"}}
