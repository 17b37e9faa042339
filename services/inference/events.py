"""Answers as server-sent events: begun with the first event, ended by [DONE]."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import structlog
from aiohttp import web

from services.inference.limits import taken

log = structlog.get_logger()
_ENCODER = msgspec.json.Encoder()


class Events:
    """The response to one request. Raises ConnectionError where the client is gone, or takes nothing any more."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

    async def send(self, event: Any) -> None:
        data = b"data: " + _ENCODER.encode(event) + b"\n\n"
        async with taken(self._http, len(data)):
            if not self.response.prepared:
                await self.response.prepare(self._http)
            await self.response.write(data)

    async def end(self) -> None:
        async with taken(self._http, 0):
            await self.response.write(b"data: [DONE]\n\n")
            await self.response.write_eof()


async def streamed(http: web.Request, tell: Callable[[Events], Awaitable[None]]) -> web.StreamResponse:
    """What `tell` sends. Where it fails before its first event the failure goes on; after that there is no status left to
    say it by, and it is told as an event."""
    events = Events(http)
    try:
        await tell(events)
        await events.end()
    except Exception as error:
        if not events.response.prepared:
            raise
        if http.transport is not None and not http.transport.is_closing():
            log.warning("stream_failed", error=f"{type(error).__name__}: {error}")
            await events.send({"error": {"message": str(error), "type": type(error).__name__}})
            await events.end()
    return events.response
