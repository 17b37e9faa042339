"""`web_search`: asks a search service outside of the sandbox. Off unless ETUDE_WEB_SEARCH names one.

The service answers `GET URL?q=QUERY` with JSON: a list, or `results` with a list, of objects with `title`, `url` and
`content` (as SearXNG does with `format=json`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.environments import InfrastructureError, ToolSpec
from shared.environments.tools import Toolbox, parameters

VARIABLE = "ETUDE_WEB_SEARCH"
HITS = 5
TIME_S = 20.0
_SHOWN = 300  # characters of a page


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    url: str
    text: str


class Searcher(Protocol):
    async def search(self, query: str, most: int) -> Sequence[Page]:
        """Return pages, best first. Raises OSError, ValueError."""


class HttpSearcher:
    """See Searcher. `url`: of the service, with any fixed parameters."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def search(self, query: str, most: int) -> Sequence[Page]:
        import aiohttp

        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIME_S)) as session:
                async with session.get(self.url, params={"q": query}) as answer:
                    answer.raise_for_status()
                    found = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"{VARIABLE}: {error or type(error).__name__}") from None
        return pages(found)[:most]


def pages(found: Any) -> list[Page]:
    """Read a service's answer. Raises ValueError."""
    rows = found.get("results") if isinstance(found, dict) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{VARIABLE}: found an answer that is no list of results")
    return [Page(str(row.get("title", "")), str(row.get("url", "")), str(row.get("content", ""))) for row in rows]


def configured() -> Searcher | None:
    """Return the service that the setting names, or None where it is not set."""
    url = os.environ.get(VARIABLE, "")
    return HttpSearcher(url) if url else None


class Tool:
    spec = ToolSpec("web_search", "Search the web.", parameters({"query": "string"}))

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        searcher = configured()
        if searcher is None:
            raise InfrastructureError(f"web_search: {VARIABLE} is not set on this machine")
        try:
            hits = await searcher.search(arguments["query"], HITS)
        except (OSError, ValueError) as error:
            raise InfrastructureError(str(error)) from None
        return "\n".join(f"{hit.title}\n{hit.url}\n{hit.text[:_SHOWN]}" for hit in hits) or "nothing found"
