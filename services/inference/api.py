"""SGLang's HTTP API, as far as the platform uses it. What goes over the wire is read and written in `wire`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from services.inference import metrics
from services.inference.contract import DISCONNECT_CHECK_S, Contract, SoFar
from services.inference.engine import Engine, Overloaded
from services.inference.events import Events
from services.inference.limits import body_of
from services.inference.live import Facts
from services.inference.news import News
from services.inference.request import Request, Result
from services.inference.wire import (
    AbortRequest,
    BadRequest,
    GenerateRequest,
    SamplingParams,
    Unavailable,
    answer,
    decode,
    key_of,
    token_array,
)


class Server(Contract):
    """The handlers. `engine` is None until the service has weights: until then /generate answers 503."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.engine: Engine | None = None
        self._open: dict[Request, tuple[web.Request, Engine]] = {}  # the engine that has it, served or not any more
        self._by_rid: dict[str, Request] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._scraped = (time.monotonic(), 0.0)
        self._judged = (0.0, 0.0)  # passes that judged drafts, and drafts accepted, at the last scrape
        self._observe()

    # -- generation --------------------------------------------------------------------------------------------------

    async def _sample(
        self,
        http: web.Request,
        asked: GenerateRequest,
        sampling: SamplingParams,
        so_far: SoFar | None,
        heard: Callable[[Request], None] | None = None,
    ) -> dict[str, Any]:
        engine, rid = self._ready(), asked.rid or ""
        if rid in self._by_rid:
            raise BadRequest(f"rid: {rid!r} is running already")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        request = Request(
            rid=rid,
            tokens_P=token_array(asked.input_ids),
            max_new_tokens=sampling.max_new_tokens,
            done=lambda result: loop.call_soon_threadsafe(_settle, future, result),
            temperature=sampling.temperature,
            stop_tokens=frozenset(sampling.stop_token_ids or ()),
            extra_key=asked.extra_key,
            seed=sampling.sampling_seed,
            routing_start=asked.routed_experts_start_len if asked.return_routed_experts else -1,
        )
        progress = None if so_far is None else _Progress(request, loop)
        if heard is not None:
            heard(request)
        started = time.perf_counter()
        try:
            engine.submit(request)
        except Overloaded as error:
            raise Unavailable(str(error)) from None
        except ValueError as error:
            raise BadRequest(str(error)) from None
        self._open[request], self._by_rid[rid] = (http, engine), request
        self.idle.clear()
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = asyncio.create_task(self._sweep())
        try:
            if progress is not None and so_far is not None and await progress.until(future, so_far):
                engine.abort(request, "enough")
            result = await future
        finally:
            if not future.done():
                engine.abort(request, "the client went away")
            self._open.pop(request, None)
            self._by_rid.pop(rid, None)
            if not self._open:
                self.idle.set()
        metrics.LATENCY.observe(time.perf_counter() - started)
        key = request.key or key_of(asked, result.weight_version)  # settled with its row, if it ever got one
        return answer(rid, key, result, engine.model.config, logprobs=asked.return_logprob)

    async def _tell_news(
        self, http: web.Request, asked: GenerateRequest, sampling: SamplingParams, events: Events
    ) -> None:
        news: list[News] = []
        whole = asyncio.create_task(
            self._sample(http, asked, sampling, None, lambda request: news.append(News(request)))
        )
        try:
            while not (await asyncio.wait({whole}, timeout=asked.told_every_s))[0]:
                if (event := news[0].event() if news else None) is not None:
                    await events.send(event)
            await events.send(whole.result())
        finally:
            if not whole.done():
                whole.cancel()

    async def _sweep(self) -> None:
        """Aborts the requests whose client has closed its connection."""
        while self._open:
            for request, (http, engine) in list(self._open.items()):
                if http.transport is None or http.transport.is_closing():
                    engine.abort(request, "the client went away")
            await asyncio.sleep(DISCONNECT_CHECK_S)

    def _ready(self) -> Engine:
        engine = self._served()
        if self.draining:
            raise Unavailable("shutting down")
        return engine

    def _served(self) -> Engine:
        if self.engine is None:
            raise Unavailable("no weights yet; /readyz says what is waited for")
        return self.engine

    # -- control -----------------------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        if self.engine is not None and not self.engine.alive:
            return web.json_response({"alive": False}, status=503)
        return web.json_response({"alive": True, "serving": self.engine is not None})

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"engine": "etude", **self._facts.describe()}
        if (engine := self.engine) is not None:
            config = engine.model.config
            info |= {
                "serial": engine.serial,
                "weight_version": str(engine.serial),
                "context_length": engine.cache.positions,
                "vocab_size": config.vocab_size,
                "model_type": config.model_type,
                "num_mtp_layers": config.num_mtp_layers,
                "paused": engine.paused,
                "steps": engine.steps,
                **engine.state(),
            }
        return info

    async def _pause(self, mode: str) -> None:
        await asyncio.wrap_future(self._ready().pause(abort=mode == "abort"))

    async def _proceed(self) -> None:
        await asyncio.wrap_future(self._ready().proceed())

    async def abort(self, http: web.Request) -> web.Response:
        """Also while draining: what nobody waits for need not be waited for."""
        asked, engine = decode(AbortRequest, await body_of(http)), self._served()
        if asked.abort_all:
            await asyncio.wrap_future(engine.abort_all("aborted on request"))
        elif asked.rid in self._by_rid:
            request = self._by_rid[asked.rid]
            self._open[request][1].abort(request, "aborted on request")
        return web.json_response({"status": "ok"})

    async def _flush(self) -> None:
        await asyncio.wrap_future(self._ready().flush())

    def _observe(self) -> None:
        """Gauges that a scrape reads from the engine itself."""

        def of(name: str) -> Callable[[], float]:
            return lambda: float(self.engine.state()[name]) if self.engine is not None else 0.0

        def throughput() -> float:
            (then, before), now = self._scraped, time.monotonic()
            self._scraped = (now, metrics.total(metrics.GENERATED_TOKENS))
            return (self._scraped[1] - before) / max(now - then, 1e-3)

        def accept_length() -> float:
            judged, accepted = metrics.total(metrics.DRAFTED, place="1"), metrics.total(metrics.ACCEPTED)
            (then, before), self._judged = self._judged, (judged, accepted)
            return 1 + (accepted - before) / (judged - then) if judged > then else 0.0

        metrics.RUNNING.set_function(of("running"))
        metrics.WAITING.set_function(of("waiting"))
        metrics.TOKEN_USAGE.set_function(of("token_usage"))
        metrics.THROUGHPUT.set_function(throughput)
        metrics.ACCEPT_LENGTH.set_function(accept_length)


class _Progress:
    """Tokens on their way from the engine's thread."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        request.progress = lambda token, _logprob, _serial: loop.call_soon_threadsafe(self._queue.put_nowait, token)

    async def until(self, future: asyncio.Future[Result], so_far: SoFar) -> bool:
        """Returns when the generation is over, or what there is of it is enough: then true."""
        tokens: list[int] = []
        while not future.done():
            waiting = asyncio.ensure_future(self._queue.get())
            await asyncio.wait({waiting, future}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                waiting.cancel()
                break
            tokens.append(waiting.result())
            while not self._queue.empty():
                tokens.append(self._queue.get_nowait())
            if await so_far(tokens):
                return True
        return False


def _settle(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)
