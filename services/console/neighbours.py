"""The services beside this one (shared.neighbours), and what each says when asked whether it is ready."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace

import aiohttp

from services.console.measures import Samples, read
from shared.neighbours import Endpoint, Resolve, addresses, find
from shared.settings import ServiceSettings

ASK_WITHIN_S = 1.0
MOST_BYTES = 4 << 20
MOST_NAME_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Wait:
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Neighbour:
    """`state`: ready, waiting (see `waits`), or silent (it should be there, and does not answer). `samples`: of its metrics.
    One that never said its name is called by its address, and has no pid."""

    name: str
    service: str
    url: str
    pid: int
    state: str
    waits: tuple[Wait, ...] = ()
    samples: Samples = field(default_factory=dict)


async def ask(session: aiohttp.ClientSession, endpoint: Endpoint) -> Neighbour | None:
    """None: nobody has that name any more. A container that was killed and replaced leaves its file behind."""
    state = "silent"
    waits: tuple[Wait, ...] = ()
    samples: Samples = {}
    try:
        if not endpoint.name:
            endpoint = await _introduced(session, endpoint)
        async with session.get(
            f"{endpoint.url}/readyz", timeout=aiohttp.ClientTimeout(total=ASK_WITHIN_S), allow_redirects=False
        ) as answer:
            body = await answer.json(content_type=None)
            state = "ready" if body["ready"] else "waiting"
            waits = tuple(Wait(str(w["waits_on"]), float(w["seconds"])) for w in body["waits"])
        samples = await _samples(session, endpoint.url)
    except aiohttp.ClientConnectorDNSError:
        if endpoint.name:
            return None
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        pass
    return Neighbour(endpoint.called, endpoint.service, endpoint.url, endpoint.pid, state, waits, samples)


async def _introduced(session: aiohttp.ClientSession, endpoint: Endpoint) -> Endpoint:
    """As it says that it is."""
    async with session.get(
        f"{endpoint.url}/healthz", timeout=aiohttp.ClientTimeout(total=ASK_WITHIN_S), allow_redirects=False
    ) as answer:
        said = json.loads(await bounded(answer, MOST_NAME_BYTES))
    return replace(endpoint, service=str(said["service"]), name=str(said["name"]), pid=int(said["pid"]))


async def _samples(session: aiohttp.ClientSession, url: str) -> Samples:
    async with session.get(
        f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=ASK_WITHIN_S), allow_redirects=False
    ) as answer:
        text = await bounded(answer, MOST_BYTES) if answer.status == 200 else b""
    return read(text.decode(errors="replace"))


async def bounded(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises ValueError where it is longer than `most` bytes."""
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > most:
            raise ValueError(f"more than {most} bytes")
    return bytes(body)


async def survey(
    session: aiohttp.ClientSession, settings: ServiceSettings, resolve: Resolve = addresses
) -> list[Neighbour]:
    """All of them, asked at the same time; by name each once, whatever number of addresses it has."""
    found = await asyncio.to_thread(find, settings, resolve)
    answers = await asyncio.gather(*[ask(session, endpoint) for endpoint in found])
    known: dict[str, Neighbour] = {}
    for neighbour in answers:
        if neighbour:
            known.setdefault(neighbour.name, neighbour)
    return list(known.values())
