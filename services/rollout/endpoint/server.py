"""HTTP: OpenAI's `/v1/chat/completions` and Anthropic's `/v1/messages`, for the attempts whose keys are open.

A key is sent as OpenAI's clients do (`Authorization: Bearer KEY`) or as Anthropic's (`x-api-key: KEY`). A door of one attempt
(`Endpoint.door`), which leads into its sandbox, takes that attempt's key alone.

An answer is written once it is sampled to its end: a stream has the events of its API, and signs of life until then.
A client that leaves ends its generation; nothing of it is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from aiohttp import web

from services.rollout import metrics
from services.rollout.endpoint.prompting import Prompt, TooLongPrompt
from services.rollout.endpoint.recording import Over, Recording
from shared.chat import Answered, Asked
from shared.chat.anthropic import answers as messages
from shared.chat.anthropic import request as anthropic_request
from shared.chat.openai import answers as completions
from shared.chat.openai import house
from shared.chat.refusing import BadRequest
from shared.environments import InfrastructureError

MOST_BODY = 64 << 20  # bytes: a conversation of a million tokens, several times over
PING_S = 10.0  # clients and proxies give up a connection that says nothing
_SHOWN = 2000  # characters of an error

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Api:
    """One API: how a request is read, and how an answer, a stream and an error are written."""

    read: Callable[[bytes], Asked]
    whole: Callable[[Answered], dict[str, Any]]
    events: Callable[[Asked, Answered], Any]
    error: Callable[[int, str, str], dict[str, Any]]
    error_event: Callable[[int, str, str], bytes]
    ping: bytes


OPENAI = Api(
    house.asked_of,
    completions.completion,
    lambda asked, answer: completions.events(answer, usage=asked.usage),
    completions.error,
    completions.error_event,
    completions.PING,
)
ANTHROPIC = Api(
    anthropic_request.asked_of,
    messages.message,
    lambda _, answer: messages.events(answer),
    messages.error,
    messages.error_event,
    messages.PING,
)
ROUTES = {"/v1/chat/completions": OPENAI, "/v1/messages": ANTHROPIC, "/v1/messages/count_tokens": ANTHROPIC}
COUNT = "/v1/messages/count_tokens"


class Refused(Exception):
    """A request that gets an error: its status, its code, and the text."""

    def __init__(self, status: int, text: str, code: str = "") -> None:
        super().__init__(text)
        self.status, self.code = status, code


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """Make aiohttp's own request, with room for long conversations."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MOST_BODY)


class Endpoint:
    """All open attempts of one worker. Use `listening` for clients that come over TCP, `door` for those of one sandbox."""

    def __init__(self) -> None:
        self._open: dict[str, Recording] = {}

    @contextlib.contextmanager
    def attempt(self, recording: Recording) -> Any:
        """Take requests with the attempt's key. Afterwards the key opens nothing, and nothing is sampled for it any more."""
        self._open[recording.key] = recording
        try:
            yield recording.key
        finally:
            self._open.pop(recording.key, None)

    @contextlib.asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[str]:
        """Take requests over TCP. `port`: 0: any that is free. Yields the address, without `/v1`."""
        runner = web.ServerRunner(self._server(None), shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def door(self, recording: Recording) -> AsyncIterator[Callable[[], Any]]:
        """Yield a function that opens a connection which takes requests of this attempt alone: (reader, writer) of a stream."""
        server = self._server(recording)

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            here, there = socket.socketpair()
            here.setblocking(False)
            there.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(server, there)
            return await asyncio.open_connection(sock=here)

        try:
            yield connect
        finally:
            await server.shutdown(1.0)

    def _server(self, only: Recording | None) -> web.Server:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            return await self._handle(request, only)

        return web.Server(handle, request_factory=_request, handler_cancellation=True, access_log=None)

    async def _handle(self, request: web.BaseRequest, only: Recording | None) -> web.StreamResponse:
        api = ROUTES.get(request.path, ANTHROPIC if "x-api-key" in request.headers else OPENAI)
        try:
            recording = self._recording(request, only)
            if request.path == "/v1/models" and request.method == "GET":
                return _models()
            if request.path not in ROUTES:
                raise Refused(404, f"path: found {request.path[:100]!r}; allowed: {', '.join(ROUTES)}, /v1/models")
            if request.method != "POST":
                raise Refused(405, f"method: found {request.method[:20]!r}; allowed: 'POST'")
            body = await request.read()
            return await self._asked(request, recording, api, body)
        except web.HTTPRequestEntityTooLarge:
            refused = Refused(413, f"request body: found more than {MOST_BODY} bytes; allowed: at most that")
        except Refused as error:
            refused = error
        except (ConnectionError, asyncio.IncompleteReadError):
            raise
        except Exception as error:  # a defect of ours: the client gets an answer, and we a trace
            log.exception("endpoint_failed", path=request.path)
            refused = Refused(500, f"{type(error).__name__}: {error}")
        metrics.ENDPOINT_REFUSED.labels(str(refused.status)).inc()
        said = api.error(refused.status, str(refused)[:_SHOWN], refused.code)
        return _json(said, status=refused.status)

    def _recording(self, request: web.BaseRequest, only: Recording | None) -> Recording:
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        recording = self._open.get(given.strip())
        if recording is None:
            raise Refused(
                401, "key: found none of an open attempt; allowed: the key that the attempt was given", "no_key"
            )
        if only is not None and recording is not only:
            raise Refused(403, "key: found one of another attempt; allowed: this attempt's own", "other_key")
        return recording

    async def _asked(self, request: web.BaseRequest, recording: Recording, api: Api, body: bytes) -> web.StreamResponse:
        with _refusing():
            if request.path == COUNT:
                asked = anthropic_request.asked_of(body, counting=True)
                return _json({"input_tokens": len(recording.prompt(asked).ids)})
            asked = api.read(body)
            prompt = recording.prompt(asked)
            if not asked.stream:
                return _json(api.whole(await recording.answer(asked, prompt)))
        return await self._streamed(request, recording, api, asked, prompt)

    async def _streamed(
        self, request: web.BaseRequest, recording: Recording, api: Api, asked: Asked, prompt: Prompt
    ) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        sampling = asyncio.ensure_future(recording.answer(asked, prompt))
        try:
            while not (await asyncio.wait({sampling}, timeout=PING_S))[0]:
                await response.write(api.ping)
            with _refusing():
                events = list(api.events(asked, sampling.result()))
        except Refused as error:
            events = [api.error_event(error.status, str(error)[:_SHOWN], error.code)]
        except Exception as error:  # a defect of ours; the head of the answer is sent
            log.exception("endpoint_failed", path=request.path)
            events = [api.error_event(500, f"{type(error).__name__}: {error}"[:_SHOWN], "")]
        finally:
            sampling.cancel()
        await response.write(b"".join(events))
        await response.write_eof()
        return response


@contextlib.contextmanager
def _refusing() -> Any:
    """Turn what a recording raises into a refusal with its status."""
    try:
        yield
    except TooLongPrompt as error:
        raise Refused(400, str(error), "context_length_exceeded") from None
    except BadRequest as error:
        raise Refused(error.status, str(error)) from None
    except Over as error:  # 403: no client tries again
        raise Refused(403, str(error), "attempt_over") from None
    except InfrastructureError as error:
        raise Refused(403, f"the attempt has failed: {error}", "attempt_failed") from None


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _models() -> web.Response:
    model = {
        "id": "etude",
        "object": "model",
        "created": 0,
        "owned_by": "etude",
        "type": "model",
        "display_name": "etude",
    }
    return _json({"object": "list", "data": [model], "has_more": False, "first_id": "etude", "last_id": "etude"})
