"""Asks the scheduler what it knows and nobody else does: how hard problems are. Read-only."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp
import msgspec

from services.console.config import ConsoleSettings
from services.console.neighbours import bounded
from shared import neighbours
from shared.contracts.standing import HardnessPage

ASK_WITHIN_S = 20.0  # a large ledger is read then; later pages are quick
MOST_BYTES = 4 << 20


class NoAnswer(Exception):
    """The text says why, for the page."""


async def hardness(http: aiohttp.ClientSession, settings: ConsoleSettings, query: Mapping[str, str]) -> HardnessPage:
    """Raises NoAnswer."""
    said = "no scheduler has announced itself; name its address in ETUDE_NEIGHBOURS where it runs on another machine"
    for url in await asyncio.to_thread(_addresses, settings):
        try:
            async with http.get(
                f"{url}/hardness",
                params=query,
                timeout=aiohttp.ClientTimeout(total=ASK_WITHIN_S),
                allow_redirects=False,
            ) as answer:
                body = await bounded(answer, MOST_BYTES)
                if answer.status == 200:
                    return msgspec.json.decode(body, type=HardnessPage)
                said = _error(body) or f"the scheduler answers {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = f"the scheduler at {url} does not answer ({type(error).__name__})"
        except (msgspec.DecodeError, ValueError) as error:
            said = f"the scheduler at {url} answers what is no page of problems: {error}"
    raise NoAnswer(said)


def _addresses(settings: ConsoleSettings) -> list[str]:
    return [found.url for found in neighbours.find(settings) if found.service == "scheduler"]


def _error(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return ""
