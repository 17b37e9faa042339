"""The HTTP contract that every engine serves: its paths and limits, and the answers that no engine has a part in. Of a
generation the engine does the sampling (`_sample`); what is asked is read, and what it becomes is written, here."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from services.inference import openapi
from services.inference.chat import template
from services.inference.chat.talk import Talk
from services.inference.errors import errors, refusal
from services.inference.events import Events, streamed
from services.inference.limits import body_of
from services.inference.live import Facts
from services.inference.wire import (
    BadRequest,
    CheckerRequest,
    GenerateRequest,
    PauseRequest,
    PinRequest,
    SamplingParams,
    Unavailable,
    decode,
    parse_generate,
    parse_update,
)
from shared.chat.openai.request import read
from shared.telemetry_spans import span

DISCONNECT_CHECK_S = 0.2  # one sweep over all open requests; a client that went away keeps its row no longer
TOLD_OF_THE_MODEL = (
    "model_path",
    "weight_version",
    "run",
    "pool",
    "serial",
    "context_length",
    "vocab_size",
    "model_type",
)
_ENCODER = msgspec.json.Encoder()
SoFar = Callable[[list[int]], Awaitable[bool]]
"""Gets all tokens so far after every step; returns whether they are enough."""


class Contract(ABC):
    """Implements services.inference.live.Server. `more`: middlewares besides `errors`, inside of it."""

    def __init__(self, facts: Facts, *more: Middleware) -> None:
        self.draining = False
        self.idle = asyncio.Event()  # set while no generation is open
        self.idle.set()
        self.broken = asyncio.Event()
        self.broken_by = ""
        self._since = int(time.time())
        self.directory: Path | None = None  # the checkpoint that the served weights began from
        self._facts = facts
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="chat")
        self._template: tuple[Path, asyncio.Task[template.ChatTemplate]] | None = None
        self.app = web.Application(middlewares=[errors, *more])
        handlers = {
            "/generate": self.generate,
            "/v1/chat/completions": self.chat,
            "/v1/models": self.models,
            "/health": self.health,
            "/get_server_info": self.server_info,
            "/server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/pause_generation": self.pause,
            "/continue_generation": self.proceed,
            "/abort_request": self.abort,
            "/flush_cache": self.flush,
            "/update_weights_from_disk": self.update_weights,
            "/weights_checker": self.weights_checker,
            "/pin": self.pin,
        }
        # Served is what is documented, by its method: the fuzz of the document reaches every handler.
        served = [getattr(web, method)(path, handlers[path]) for path, (method, _, _) in openapi.OPERATIONS.items()]
        self.app.add_routes([*served, web.get("/openapi.json", self.openapi)])

    # -- the engine's part -------------------------------------------------------------------------------------------

    @abstractmethod
    async def _sample(
        self, http: web.Request, asked: GenerateRequest, sampling: SamplingParams, so_far: SoFar | None
    ) -> dict[str, Any]:
        """The answer of /generate; `asked` has a `rid`. What is enough is ended as an abort ends it, with what there is. A
        client that goes away frees its row. Raises BadRequest, Unavailable."""

    async def _tell_news(
        self, http: web.Request, asked: GenerateRequest, sampling: SamplingParams, events: Events
    ) -> None:
        """Send what is new every `told_every_s`, where the engine can tell, and the whole answer at the end."""
        asked.stream = False
        await events.send(await self._sample(http, asked, sampling, None))

    @abstractmethod
    async def health(self, _: web.Request) -> web.Response: ...

    @abstractmethod
    async def abort(self, http: web.Request) -> web.Response: ...

    @abstractmethod
    def _ready(self) -> object:
        """Raises Unavailable while nothing can be served."""

    @abstractmethod
    def _info(self) -> dict[str, Any]: ...

    @abstractmethod
    async def _pause(self, mode: str) -> None:
        """Raises Unavailable. Mode "abort" ends what is running, "in_place" lets it stand still."""

    @abstractmethod
    async def _proceed(self) -> None: ...

    @abstractmethod
    async def _flush(self) -> None: ...

    # -- generation --------------------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.StreamResponse:
        self._ready()
        asked, sampling = parse_generate(await body_of(http))
        asked.rid = rid = asked.rid or uuid.uuid4().hex

        async def tell(events: Events) -> None:
            async def so_far(tokens: list[int]) -> bool:
                meta = {"id": rid, "finish_reason": None}
                await events.send({"text": "", "output_ids": tokens, "meta_info": meta})
                return False

            await events.send(await self._sample(http, asked, sampling, so_far))

        with span("sample", http.headers, kind="server", rid=rid):
            if asked.stream and asked.told_every_s > 0:
                return await streamed(http, partial(self._tell_news, http, asked, sampling))
            if asked.stream:
                return await streamed(http, tell)
            return _json(await self._sample(http, asked, sampling, None))

    async def chat(self, http: web.Request) -> web.StreamResponse:
        self._ready()
        asked = read(await body_of(http))
        directory, speaks = await self._chat_template()
        # Apart from the other requests, and from who follows the weights: long conversations take a while to be read.
        loop, context = asyncio.get_running_loop(), int(self._info()["context_length"])
        talk = await loop.run_in_executor(self._readers, lambda: Talk(asked, speaks, context=context))
        if directory != self.directory:
            raise Unavailable("another checkpoint is served now")

        async def hear(tokens: list[int]) -> bool:
            return talk.hear(tokens)

        async def tell(events: Events) -> None:
            async def so_far(tokens: list[int]) -> bool:
                if not events.response.prepared:
                    await events.send(talk.first_chunk())
                enough = talk.hear(tokens)
                for chunk in talk.chunks():
                    await events.send(chunk)
                return enough

            answer = await self._sample(http, talk.generate, talk.sampling, so_far)
            last = list(talk.last_chunks(answer))
            for chunk in [*([] if events.response.prepared else [talk.first_chunk()]), *last]:
                await events.send(chunk)

        if talk.streams:
            return await streamed(http, tell)
        answer = await self._sample(http, talk.generate, talk.sampling, hear if talk.generate.stream else None)
        return _json(await loop.run_in_executor(self._readers, talk.completion, answer))

    async def _chat_template(self) -> tuple[Path, template.ChatTemplate]:
        """Of the checkpoint that is served, read once; one that cannot be read is tried again, it may have been repaired."""
        assert self.directory is not None, "there is none before there are weights"
        if self._template is None or self._template[0] != self.directory:
            self._template = self.directory, asyncio.create_task(asyncio.to_thread(template.load, self.directory))
        directory, loading = self._template
        try:
            return directory, await asyncio.shield(loading)
        except BadRequest:
            self._template = None
            raise

    # -- alike for all -----------------------------------------------------------------------------------------------

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._info())

    async def model_info(self, _: web.Request) -> web.Response:
        info = self._info()
        return web.json_response({"is_generation": True, **{k: info[k] for k in TOLD_OF_THE_MODEL if k in info}})

    async def models(self, _: web.Request) -> web.Response:
        self._ready()
        info = self._info()
        model = {
            "id": info["run"] or info["model_path"],
            "object": "model",
            "created": self._since,
            "owned_by": "etude",
            "root": info["model_path"],
            "max_model_len": info["context_length"],
        }
        return web.json_response({"object": "list", "data": [model]})

    async def pause(self, http: web.Request) -> web.Response:
        mode = decode(PauseRequest, await body_of(http)).mode
        if mode not in ("abort", "in_place"):
            raise BadRequest(f"mode: found {mode!r}; allowed: 'abort', 'in_place'")
        await self._pause(mode)
        return web.json_response({"status": "ok", "message": f"paused ({mode})"})

    async def proceed(self, _: web.Request) -> web.Response:
        await self._proceed()
        return web.json_response({"status": "ok", "message": "continued"})

    async def flush(self, _: web.Request) -> web.Response:
        await self._flush()
        return web.json_response({"success": True, "message": "every parked session is forgotten"})

    async def weights_checker(self, http: web.Request) -> web.Response:
        action = decode(CheckerRequest, await body_of(http)).action
        if action != "checksum":
            raise BadRequest(f"action: found {action!r}; allowed: 'checksum'")
        self._ready()
        return web.json_response({"success": True, "message": "", **await self._facts.checksums()})

    async def update_weights(self, http: web.Request) -> web.Response:
        """SGLang's clients look for `success`, also in a refusal."""
        body = await body_of(http)
        try:
            asked = parse_update(body)
            self._ready()
            told = await self._facts.update(asked)
        except BadRequest as error:
            said = {"success": False, "message": str(error), **refusal(error)}
            return web.json_response(said, status=error.status)
        return web.json_response({"success": True, **told})

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(openapi.document())

    async def pin(self, http: web.Request) -> web.Response:
        return web.json_response(await self._facts.pin(decode(PinRequest, await body_of(http)).serial))


def _json(answer: dict[str, Any]) -> web.Response:
    return web.Response(body=_ENCODER.encode(answer), content_type="application/json")
