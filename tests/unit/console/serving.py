"""A console that has read the world's messages, asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp

from services.console.access import Person, Role, Tokens
from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.pages import build_app
from services.console.service import serve
from services.console.site import Access
from shared import bus
from shared.bus import Bus
from shared.contracts.messages import RunStatus
from shared.telemetry import Health
from tests.ruling import rule
from tests.unit.console.conftest import RUN, World

OPERATOR, VIEWER = "operator-token-0123456789", "viewer-token-0123456789"  # of alice and of victor


def access() -> Access:
    return Access(Tokens({Person("alice", Role.operator): OPERATOR, Person("victor", Role.viewer): VIEWER}))


class Page(HTMLParser):
    """What a browser would find: elements with their attributes, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.html = html
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def hidden(self, name: str) -> str:
        """The value of the first field of this name."""
        return next(a["value"] or "" for tag, a in self.elements if tag == "input" and a.get("name") == name)


@dataclass
class Console:
    url: str
    http: aiohttp.ClientSession
    bus: Bus
    board: Board
    access: Access

    async def get(self, path: str, **options: Any) -> tuple[int, Any, Page]:
        async with self.http.get(self.url + path, **options) as answer:
            return answer.status, answer.headers, Page(await answer.text())

    async def post(self, path: str, form: dict[str, str], **options: Any) -> tuple[int, Any, Page]:
        async with self.http.post(self.url + path, data=form, **options) as answer:
            return answer.status, answer.headers, Page(await answer.text())


@contextlib.asynccontextmanager
async def console(world: World, state: Path, *, within_s: float | None = 240, **options: Any) -> AsyncIterator[Console]:
    """`options`: settings. Nobody is signed in."""
    settings = ConsoleSettings(state=state, bus=f"sqlite:{state / 'bus.db'}", **options)
    board, entry = Board(settings.console_attempts), access()
    app = build_app(settings, board, Library(world.objects, settings.formats), entry)
    async with asyncio.timeout(within_s), Health("console", settings, app) as health:
        entry.bus = messages = bus.connect(settings.bus_url, client="test")
        await messages.publish_many(world.messages)
        stop = asyncio.Event()
        serving = asyncio.create_task(serve(messages, board, health, stop))
        known = [message for _, _, message in world.messages if isinstance(message, RunStatus)]
        ruling = asyncio.create_task(rule(messages, *known))
        while not board.alerts or not board.runs or not board.runs[RUN].evals:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            # The jar keeps cookies of addresses too, as a browser does.
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(cookie_jar=jar) as http:
                yield Console(health.url, http, messages, board, entry)
        finally:
            stop.set()
            await serving
            ruling.cancel()
            await messages.close()
