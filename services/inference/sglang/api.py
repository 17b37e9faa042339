"""Our HTTP API in front of SGLang: what is asked is checked and mapped, what it answers is checked and mapped back."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from services.inference.contract import DISCONNECT_CHECK_S, Contract, SoFar
from services.inference.limits import body_of
from services.inference.live import Facts
from services.inference.sglang import metrics
from services.inference.sglang.client import Client, ServerLost, ServerRefused
from services.inference.sglang.live import CONTROL_S, SglangLive
from services.inference.sglang.mapping import (
    BadAnswer,
    ComputedAgain,
    answer,
    failure,
    request_body,
    sent_rid,
    stream_part,
)
from services.inference.sglang.server import Server
from services.inference.wire import (
    AbortRequest,
    BadRequest,
    GenerateRequest,
    SamplingParams,
    Unavailable,
    decode,
)
from shared.weights import WeightsError

Read = Callable[[bytes], dict[str, Any]]  # SGLang's answer to ours


class Api(Contract):
    """The handlers. `live` and `keeper` are None until the service has weights: until then /generate answers 503."""

    def __init__(self, facts: Facts, client: Client) -> None:
        super().__init__(facts, failures)
        self.live: SglangLive | None = None
        self.keeper: Server | None = None
        self._client = client
        self._open: dict[str, tuple[web.Request, asyncio.Task[Any]]] = {}  # by the client's rid
        self._sweeper: asyncio.Task[None] | None = None

    # -- generation --------------------------------------------------------------------------------------------------

    async def _sample(
        self, http: web.Request, asked: GenerateRequest, sampling: SamplingParams, so_far: SoFar | None
    ) -> dict[str, Any]:
        live, rid = self._ready(), asked.rid or ""
        if rid in self._open:
            raise BadRequest(f"rid: {rid!r} is running already")
        serial, routing, lag = live.serial, live.model.moe is not None, live.lag
        body = request_body(
            rid,
            asked,
            sampling,
            vocabulary=live.model.vocab_size,
            context=live.context,
            serial=serial,
            routing=routing,
            seed=secrets.randbits(31),
            lineage=live.lineage,
        )

        def read(data: bytes) -> dict[str, Any]:
            try:
                mine = answer(data, rid, asked, sampling, serial=serial, routing=routing, lag=lag, flushes=live.flushes)
            except ComputedAgain:
                metrics.RETRACTED.inc()
                raise
            _count(mine)
            return mine

        asking = asyncio.create_task(
            self._whole(body, read) if so_far is None else self._stream(rid, body, read, so_far)
        )
        self._open[rid] = (http, asking)
        self.idle.clear()
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())
        try:
            await asyncio.wait({asking})
            if asking.cancelled():
                raise Unavailable("the client went away")
            return asking.result()
        finally:
            if not asking.done() or asking.cancelled() or isinstance(asking.exception(), ConnectionError):
                asking.cancel()
                await self._forget(rid)
            self._open.pop(rid, None)
            if not self._open:
                self.idle.set()

    async def _whole(self, body: bytes, read: Read) -> dict[str, Any]:
        async with self._post(body) as response:
            data, status = await response.read(), response.status
        if status != 200:
            raise failure(status, data)
        return read(data)

    async def _stream(self, rid: str, body: bytes, read: Read, so_far: SoFar) -> dict[str, Any]:
        mine: dict[str, Any] | None = None
        enough = False
        async with self._post(body) as response:
            if response.status != 200:
                raise failure(response.status, await response.read())
            async for event in _events(response):
                tokens, last = stream_part(event, rid)
                if last:
                    mine = read(event)
                elif not enough and (enough := await so_far(tokens)):
                    await self._forget(rid)
        if mine is None:
            raise BadAnswer(f"/generate of {rid}: the stream ended before the answer")
        return mine

    def _post(self, body: bytes) -> Any:
        return self._client.session.post(
            f"{self._client.url}/generate", data=body, headers={"Content-Type": "application/json"}
        )

    async def _sweep(self) -> None:
        """Ends the requests whose client has closed its connection."""
        while self._open:
            for http, asking in list(self._open.values()):
                if http.transport is None or http.transport.is_closing():
                    asking.cancel()
            await asyncio.sleep(DISCONNECT_CHECK_S)

    async def _forget(self, rid: str) -> None:
        """Nobody waits for it any more. SGLang also notices the closed connection, if later."""
        with contextlib.suppress(ServerLost, ServerRefused):
            await self._client.abort(sent_rid(rid))

    def _ready(self) -> SglangLive:
        live = self._served()
        if self.draining:
            raise Unavailable("shutting down")
        return live

    def _served(self) -> SglangLive:
        if self.live is None or self.keeper is None:
            raise Unavailable("no weights yet; /readyz says what is waited for")
        if not self.keeper.up.is_set():
            raise Unavailable("SGLang is not up; /readyz says why")
        return self.live

    # -- control -----------------------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        """Answered from what the keeper saw last: SGLang's own answer takes a second, and a probe does not wait so long."""
        if self.keeper is not None and not self.keeper.up.is_set():
            return web.json_response({"alive": False}, status=503)
        return web.json_response({"alive": True, "serving": self.live is not None})

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"engine": "sglang", **self._facts.describe()}
        if (live := self.live) is not None and self.keeper is not None:
            info |= {
                "serial": live.serial,
                "weight_version": str(live.serial),
                "context_length": live.context,
                "vocab_size": live.model.vocab_size,
                "model_type": live.model.model_type,
                "num_mtp_layers": live.model.num_mtp_layers,
                "paused": self.keeper.paused,
                "up": self.keeper.up.is_set(),
                "starts": self.keeper.starts,
                "open": len(self._open),
                "url": self._client.url,
            }
        return info

    async def _pause(self, mode: str) -> None:
        async with self._between_swaps() as keeper:
            await self._client.pause(mode, CONTROL_S)
            keeper.paused = True

    async def _proceed(self) -> None:
        async with self._between_swaps() as keeper:
            await self._client.proceed(CONTROL_S)
            keeper.paused = False

    async def abort(self, http: web.Request) -> web.Response:
        """Also while draining: what nobody waits for need not be waited for."""
        asked = decode(AbortRequest, await body_of(http))
        self._served()
        if asked.abort_all:
            await self._client.abort_all()
        elif asked.rid in self._open:
            await self._client.abort(sent_rid(asked.rid))
        return web.json_response({"status": "ok"})

    async def _flush(self) -> None:
        async with self._between_swaps():
            await self._client.flush()

    @contextlib.asynccontextmanager
    async def _between_swaps(self) -> AsyncIterator[Server]:
        """In a swap the server must stand still until its new weights were verified: who comes then waits."""
        live = self._ready()
        async with live.still:
            if self._ready() is not live or self.keeper is None:  # what was waited for may have ended it
                raise Unavailable("another engine is started; /readyz says what is waited for")
            yield self.keeper


@web.middleware
async def failures(request: web.Request, handler: Any) -> web.StreamResponse:
    """A server that is gone is 503, what it should not have answered 500."""
    try:
        return await handler(request)
    except (ServerLost, aiohttp.ClientError, OSError) as error:
        raise Unavailable(f"SGLang: {type(error).__name__}: {error}") from None
    except (ServerRefused, BadAnswer, WeightsError) as error:
        return web.json_response({"error": {"message": str(error), "type": type(error).__name__}}, status=500)


async def _events(response: aiohttp.ClientResponse) -> Any:
    """The data of each server-sent event, [DONE] left out."""
    rest = b""
    async for chunk in response.content.iter_any():
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                yield data


def _count(mine: dict[str, Any]) -> None:
    meta = mine["meta_info"]
    metrics.REQUESTS.labels(meta["finish_reason"]["type"]).inc()
    if msgspec.json.decode(meta.get("num_retractions", b"0")):
        metrics.RETRACTED.inc()
