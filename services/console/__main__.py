"""`python -m services.console`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

import structlog

from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.pages import build_app
from services.console.service import serve
from shared import bus, objects
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: ConsoleSettings) -> None:
    board = Board(settings.console_attempts)
    library = Library(objects.connect(settings.objects_url), settings.formats)
    app = build_app(settings, board, library)
    async with draining() as stop, Health("console", settings, app) as health:
        health.wait_on("messages")
        messages = bus.connect(settings.bus_url, client=health.name)
        structlog.get_logger().info("console.open", url=health.url)
        try:
            await serve(messages, board, health, stop)
        finally:
            await messages.close()


def main() -> None:
    settings = load(ConsoleSettings)
    configure_logs("console", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
