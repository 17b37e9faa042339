"""HTTP to one replica: SGLang's `/generate`, one request, one answer, every failure typed. Retrying is `inference`'s."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from services.rollout.generation import BadReply, Generation, RoutingShape, parse
from shared.telemetry_spans import carry

CONNECT_S = 1.0
RETRY_AFTER_S = 1.0  # where the engine says nothing that is a number
LEAST_RETRY_AFTER_S, MOST_RETRY_AFTER_S = 0.1, 30.0  # whatever it says


class EngineUnavailable(Exception):
    """Asking again, here or elsewhere, can help. Without `broke` it was no answer at all: one waits as long as it takes. With it
    the engine tried and failed: not to be repeated for ever."""

    def __init__(self, reason: str, *, broke: bool = False) -> None:
        super().__init__(reason)
        self.broke = broke


class EngineBusy(Exception):
    """It lives, and said "not now" (503, 429): after `retry_after_s` it may be asked again, another one at once."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class EngineRefused(Exception):
    """The engine understood and will not: the same request fails everywhere."""


@dataclass(frozen=True, slots=True)
class Request:
    """One generation. `first_row`: routing rows before it are recorded already. `cache_key`: the version under which the
    session's cache entries were begun; a session keeps it over a swap, and no other version's session ever hits them."""

    rid: str
    tokens: list[int]
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    cache_key: int
    first_row: int
    seed: int | None = None

    def body(self, routing: bool) -> bytes:
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
            "extra_key": str(self.cache_key),
            "return_logprob": True,
        }
        if routing:
            body |= {"return_routed_experts": True, "routed_experts_start_len": self.first_row}
        return msgspec.json.encode(body)


class EngineClient:
    """One connection pool for all replicas. Use as an async context manager."""

    def __init__(self, *, generate_s: float, probe_s: float) -> None:
        self._generate_timeout = aiohttp.ClientTimeout(total=generate_s, sock_connect=CONNECT_S)
        self._probe_timeout = aiohttp.ClientTimeout(total=probe_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), raise_for_status=False)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("engine client: use it within `async with`")
        return self._session

    async def generate(self, url: str, request: Request, routing: RoutingShape | None) -> Generation:
        """Raises EngineUnavailable, EngineBusy, EngineRefused."""
        try:
            async with self._http.post(
                f"{url}/generate",
                data=request.body(routing is not None),
                headers={"Content-Type": "application/json", **carry()},
                timeout=self._generate_timeout,
            ) as response:
                data, status = await response.read(), response.status
                retry_after = response.headers.get("Retry-After", "")
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{url}: {type(error).__name__}: {error}") from None
        except TimeoutError:
            raise EngineUnavailable(f"{url}: no answer within {self._generate_timeout.total} s") from None
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
                session_version=request.cache_key,
            )
        except BadReply as error:
            raise EngineRefused(f"{url}: {error}") from None
        if generation.finish == "abort" or not generation.tokens:
            raise EngineUnavailable(f"{url}: the generation was aborted", broke=True)
        return generation

    async def abort(self, url: str, rid: str) -> None:
        """Tells the engine that nobody waits any more. Best effort: an engine that is gone computes nothing either."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._http.post(f"{url}/abort_request", json={"rid": rid}, timeout=self._probe_timeout):
                pass

    async def alive(self, url: str) -> bool:
        """Whether the replica answers, and has weights to answer with: one that was killed and is back has none for a while, and
        says 503 like one that is busy. A stopped process keeps its socket open and says nothing."""
        try:
            async with self._http.get(f"{url}/health", timeout=self._probe_timeout) as response:
                return response.status < 500 and _serves(await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False


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
