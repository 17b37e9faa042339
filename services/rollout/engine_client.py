"""HTTP to one replica: SGLang's `/generate`, one request, one answer, every failure typed. Retrying is `inference`'s.

A generation has no time limit here: how long one takes depends on its length, on the queue and on pauses, and a limit would throw
away what is being sampled. Its connection breaks where the other side is gone; whether a replica that is there works is
`inference`'s to judge, by `alive` and `steps`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from services.rollout.generation import BadReply, Generation, RoutingShape, parse
from shared.telemetry_spans import carry

CONNECT_S = 1.0
TOLD_EVERY_S = 0.1  # what an engine has sampled since is lost with its machine
UNREAD_S = 0.1  # of a probe's patience: an answer that came while this process was away itself is read first
RETRY_AFTER_S = 1.0  # where the engine says nothing that is a number
LEAST_RETRY_AFTER_S, MOST_RETRY_AFTER_S = 0.1, 30.0  # whatever it says
# Seconds of silence, seconds between questions, and how many stay unanswered, until the kernel breaks a connection whose other
# side is gone without a word. A stopped process is not gone: its kernel answers.
GONE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class EngineUnavailable(Exception):
    """Asking again, here or elsewhere, can help. Without `broke` it was no answer at all: one waits as long as it takes. With it
    the engine tried and failed: not to be repeated for ever. `blameless`: it says nothing against the replica."""

    def __init__(self, reason: str, *, broke: bool = False, blameless: bool = False) -> None:
        super().__init__(reason)
        self.broke = broke
        self.blameless = blameless


class EngineBusy(Exception):
    """It lives, and said "not now" (503, 429): after `retry_after_s` it may be asked again, another one at once."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class EngineRefused(Exception):
    """The engine understood and will not: the same request fails everywhere."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `first_row`: routing rows before it are recorded already. `cache_key`: what the session's cache entries
    are kept under, as the engine said with its first answer; a session keeps it over a swap. None: there was no answer yet. The
    engine then takes a name of the version that serves, and only it knows which that is: what a worker has heard may be older,
    and a new session must not hit another version's KV."""

    rid: str
    tokens: list[int]
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    cache_key: str | None
    first_row: int
    seed: int | None = None

    def body(self, routing: bool, *, told: bool = False) -> bytes:
        """`told`: ask for news of what is sampled, every TOLD_EVERY_S; engines that know no such thing only answer."""
        sampling: dict[str, object] = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": self.stop_token_ids,
        }
        if self.seed is not None:
            sampling["sampling_seed"] = self.seed
        body: dict[str, object] = {
            "input_ids": self.tokens,
            "sampling_params": sampling,
            "rid": self.rid,
            "return_logprob": True,
        }
        if told:
            body |= {"stream": True, "told_every_s": TOLD_EVERY_S}
        if self.cache_key is not None:
            body["extra_key"] = self.cache_key
        if routing:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.first_row}
        return msgspec.json.encode(body)


class _Info(msgspec.Struct):
    steps: int | None = None
    paused: bool = False


class EngineClient:
    """One connection pool for all replicas. Use as an async context manager."""

    def __init__(self, *, probe_s: float) -> None:
        self._probe_s = probe_s
        self._generate_timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._ask_timeout = aiohttp.ClientTimeout(total=probe_s + UNREAD_S)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        connector = aiohttp.TCPConnector(limit=0, socket_factory=_watched)
        self._session = aiohttp.ClientSession(connector=connector, raise_for_status=False)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("engine client: use it within `async with`")
        return self._session

    async def generate(
        self,
        url: str,
        request: Request,
        routing: RoutingShape | None,
        *,
        versioned: bool = True,
        heard: Callable[[Generation], None] | None = None,
    ) -> Generation:
        """Send one generation request and wait for the reply, without a time limit. `versioned`: as in `generation.parse`. A
        generation that the engine ended early comes with what it had sampled, and finish="abort". `heard`: called with what is
        new while it is sampled, without routing; None: nobody asks. Raises EngineUnavailable, EngineBusy, EngineRefused."""
        try:
            async with self._http.post(
                f"{url}/generate",
                data=request.body(routing is not None, told=heard is not None),
                headers={"Content-Type": "application/json", **carry()},
                timeout=self._generate_timeout,
            ) as response:
                status = response.status
                if heard is not None and response.content_type == "text/event-stream":
                    data = await _listened(response, heard)
                else:
                    data = await response.read()
                retry_after = response.headers.get("Retry-After", "")
        except BadReply as error:
            raise EngineRefused(f"{url}: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            # Too slowly connected: its queue is full, or this process was away. Whether it is there, the probes say.
            late = isinstance(error, aiohttp.ConnectionTimeoutError)
            raise EngineUnavailable(f"{url}: {type(error).__name__}: {error}", blameless=late) from None
        if status in (408, 425):  # it did not get the request in time: what lies between was slow, or this process
            raise EngineUnavailable(f"{url}: HTTP {status}: {data[:200]!r}", blameless=True)
        if status in (429, 503):
            raise EngineBusy(f"{url}: HTTP {status}: {data[:200]!r}", retry_after_s(retry_after))
        if status >= 500:
            raise EngineUnavailable(f"{url}: HTTP {status}: {data[:200]!r}", broke=True)
        if status != 200:
            raise EngineRefused(f"{url}/generate: HTTP {status}: {data[:500].decode(errors='replace')}")
        try:
            generation = parse(
                data,
                prompt_tokens=len(request.tokens),
                first_row=request.first_row,
                routing=routing,
                versioned=versioned,
            )
        except BadReply as error:
            raise EngineRefused(f"{url}: {error}") from None
        if not generation.tokens:
            raise EngineUnavailable(f"{url}: the generation was aborted before its first token", broke=True)
        return generation

    async def abort(self, url: str, rid: str) -> None:
        """Tells the engine that nobody waits any more. Best effort: an engine that is gone computes nothing either."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._http.post(f"{url}/abort_request", json={"rid": rid}, timeout=self._ask_timeout):
                pass

    async def alive(self, url: str) -> bool:
        """Whether the replica answers in time, and has weights to answer with: one that was killed and is back has none for a
        while, and says 503 like one that is busy. A stopped process keeps its socket open and says nothing."""
        asking = asyncio.create_task(self._healthy(url))
        try:
            for patience_s in (self._probe_s, UNREAD_S):
                await asyncio.wait({asking}, timeout=patience_s)
            return asking.done() and asking.result()
        finally:
            asking.cancel()

    async def _healthy(self, url: str) -> bool:
        try:
            async with self._http.get(f"{url}/health") as response:
                return response.status < 500 and _serves(await response.read())
        except (aiohttp.ClientError, OSError):
            return False

    async def steps(self, url: str) -> int | None:
        """How many steps the engine has made. None: it does not say (SGLang's own keeper ends one that hangs), or stands still
        because it was told to."""
        try:
            async with self._http.get(f"{url}/server_info", timeout=self._ask_timeout) as response:
                info = msgspec.json.decode(await response.read(), type=_Info)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError):
            return None
        return None if info.paused else info.steps


class _EventMeta(msgspec.Struct):
    new: bool = False
    finish_reason: Any = None


class _Event(msgspec.Struct):
    meta_info: _EventMeta | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


async def _listened(response: aiohttp.ClientResponse, heard: Callable[[Generation], None]) -> bytes:
    """Call `heard` with each event that tells only what is new, and return the last, which is the whole answer. Raises BadReply,
    ConnectionError where the stream ended without an answer."""
    left = bytearray()
    answer = b""
    async for chunk in response.content.iter_any():
        left += chunk
        *events, rest = left.split(b"\n\n") if b"\n\n" in chunk or left.endswith(b"\n\n") else [left]
        left = rest
        for event in (bytes(event.removeprefix(b"data: ")) for event in events):
            if event == b"[DONE]":
                continue
            try:
                read = _EVENT.decode(event)
            except msgspec.MsgspecError as error:
                raise BadReply(f"/generate: an event of the stream: {error}") from None
            if read.error is not None:
                raise ConnectionError(f"the stream failed: {read.error}")
            if read.meta_info is not None and read.meta_info.new:
                heard(_piece(event))
            elif read.meta_info is not None and read.meta_info.finish_reason is not None:
                answer = event
    if not answer:
        raise ConnectionError("the stream ended before the answer")
    return answer


def _piece(event: bytes) -> Generation:
    return replace(parse(event, prompt_tokens=0, first_row=0, routing=None), finish="abort")


def _watched(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in GONE.items():
        if hasattr(socket, name):  # not everywhere; then the system's own patience holds
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def _serves(health: bytes) -> bool:
    """Whatever says nothing of it does."""
    try:
        return msgspec.json.decode(health, type=dict[str, Any]).get("serving") is not False
    except msgspec.MsgspecError:
        return True


def retry_after_s(header: str) -> float:
    """What a Retry-After asks for; a date is none that our engines send."""
    try:
        asked = float(header)
    except ValueError:
        return RETRY_AFTER_S
    return max(LEAST_RETRY_AFTER_S, min(MOST_RETRY_AFTER_S, asked)) if asked >= 0 else RETRY_AFTER_S
