"""`python -m services.curator`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

from services.curator.config import CuratorConfig
from services.curator.service import serve
from shared import objects
from shared.bus.watched import opened
from shared.environments.places import opened_places
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: CuratorConfig) -> None:
    async with (
        draining() as stop,
        Health("curator", settings) as health,
        opened(settings.bus_url, health) as messages,
    ):
        store = objects.connect(settings.objects_url)
        async with opened_places(settings, settings.curator_sandboxes, store, settings.sandbox) as places:
            await serve(settings, messages, store, places, health, stop)


def main() -> None:
    settings = load(CuratorConfig)
    configure_logs("curator", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
