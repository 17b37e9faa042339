"""What a client may keep a replica waiting: each request's body and each write of an answer have a limit, in time and in size."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog
from aiohttp import web

from services.inference.wire import BadRequest

MAX_BODY = 64 << 20
STALL_S = 15.0  # longer than a busy laptop is away; with drain_s below the 30 s that orchestrators give
SLOWEST = 1 << 20  # bytes a second, beyond that: an answer with its routing is megabytes

log = structlog.get_logger()


class TooLarge(BadRequest):
    status = 413


class TooSlow(BadRequest):
    status = 408


class ClientStalled(ConnectionError):
    """It takes nothing of its answer. Its connection is closed."""


async def body_of(http: web.Request) -> bytes:
    """The whole body. Raises TooLarge; TooSlow where it does not come within STALL_S and the time that its bytes may take; and
    BadRequest where the client leaves before its end."""
    if (http.content_length or 0) > MAX_BODY:
        raise _too_large(http.content_length or 0)
    data, began = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(STALL_S) as limit:
            async for chunk in http.content.iter_any():
                data += chunk
                if len(data) > MAX_BODY:
                    raise _too_large(len(data))
                limit.reschedule(began + STALL_S + len(data) / SLOWEST)
    except TimeoutError:
        log.warning("client_stalled", path=http.path, doing="sending", bytes=len(data))
        raise TooSlow(
            f"request body: {len(data)} bytes within {STALL_S:g} s; allowed: the whole, {STALL_S:g} s and a second for "
            f"every {SLOWEST} bytes"
        ) from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"request body: {error}") from None
    except ConnectionError:
        raise BadRequest(f"request body: {len(data)} bytes, then the connection ended") from None
    return bytes(data)


def _too_large(size: int) -> TooLarge:
    return TooLarge(f"request body: found {size} bytes or more; allowed: {MAX_BODY}")


@contextlib.asynccontextmanager
async def taken(http: web.Request, size: int) -> AsyncIterator[None]:
    """Around a write of `size` bytes. Where the client does not take them its connection is closed: raises ClientStalled."""
    allowed = STALL_S + size / SLOWEST
    try:
        async with asyncio.timeout(allowed):
            yield
    except TimeoutError:
        log.warning("client_stalled", path=http.path, doing="reading", bytes=size)
        if http.transport is not None:
            http.transport.abort()
        raise ClientStalled(f"{size} bytes of an answer were not taken within {allowed:.3g} s") from None


async def answered(http: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """The response, written; nothing is left to write where the client is gone."""
    if isinstance(response, web.Response) and not response.prepared:
        size = len(response.body) if isinstance(response.body, bytes | bytearray) else 0
        with contextlib.suppress(ConnectionError):
            async with taken(http, size):
                await response.prepare(http)
                await response.write_eof()
    return response
