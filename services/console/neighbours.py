"""The services beside this one: what `<state>/run/*.json` names, and what each says when asked whether it is ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from services.console.measures import Samples, read

ASK_WITHIN_S = 1.0
MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Wait:
    what: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Neighbour:
    """`state`: ready, waiting (see `waits`), or silent (its file is there, it does not answer). `samples`: of its metrics."""

    name: str
    service: str
    url: str
    pid: int
    state: str
    waits: tuple[Wait, ...] = ()
    samples: Samples = field(default_factory=dict)


def endpoints(state: Path) -> Iterator[dict[str, Any]]:
    """What the services wrote about themselves. A file that is being written, or is none of ours, is left out."""
    for path in sorted((state / "run").glob("*.json")):
        try:
            found = json.loads(path.read_text())
            if {"name", "service", "url", "pid"} <= found.keys() and urlsplit(found["url"]).scheme == "http":
                yield found
        except (OSError, ValueError, AttributeError, TypeError):
            continue


async def ask(session: aiohttp.ClientSession, endpoint: dict[str, Any]) -> Neighbour | None:
    """None: nobody has that name any more. A container that was killed and replaced leaves its file behind."""
    state = "silent"
    waits: tuple[Wait, ...] = ()
    samples: Samples = {}
    try:
        async with session.get(
            f"{endpoint['url']}/readyz", timeout=aiohttp.ClientTimeout(total=ASK_WITHIN_S), allow_redirects=False
        ) as answer:
            body = await answer.json(content_type=None)
            state = "ready" if body["ready"] else "waiting"
            waits = tuple(Wait(str(w["waits_on"]), float(w["seconds"])) for w in body["waits"])
        samples = await _samples(session, endpoint["url"])
    except aiohttp.ClientConnectorDNSError:
        return None
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        pass
    return Neighbour(
        str(endpoint["name"]), str(endpoint["service"]), endpoint["url"], int(endpoint["pid"]), state, waits, samples
    )


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


async def survey(session: aiohttp.ClientSession, state: Path) -> list[Neighbour]:
    """All of them, asked at the same time."""
    found = await asyncio.to_thread(lambda: list(endpoints(state)))
    answers = await asyncio.gather(*[ask(session, endpoint) for endpoint in found])
    return [neighbour for neighbour in answers if neighbour]
