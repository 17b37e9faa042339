"""`python -m services.console`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

import structlog

from services.console import keys
from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.pages import build_app
from services.console.service import serve
from services.console.site import Access
from shared import objects
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: ConsoleSettings) -> None:
    board = Board(settings.console_attempts)
    library = Library(objects.connect(settings.objects_url), settings.formats)
    known, file = keys.tokens(settings)
    access = Access(known)
    app = build_app(settings, board, library, access)
    async with (
        draining() as stop,
        Health("console", settings, app) as health,
        opened(settings.bus_url, health) as messages,
    ):
        health.wait_on("messages")
        access.bus = messages
        log = structlog.get_logger()
        log.info("console.open", url=health.url, reading="open" if settings.open_to_readers else "token")
        log.info("console.token", of="operator", lies_in=str(file) if file else "the settings")
        await serve(messages, board, health, stop)


def main() -> None:
    settings = load(ConsoleSettings)
    configure_logs("console", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
