"""`python -m services.rollout`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

from services.rollout.config import RolloutSettings
from services.rollout.service import serve
from shared import objects
from shared.bus.watched import opened
from shared.environments.places import opened_places
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: RolloutSettings) -> None:
    async with (
        draining() as stop,
        Health("rollout", settings) as health,
        opened(settings.bus_url, health) as messages,
    ):
        store = objects.connect(settings.objects_url)
        async with opened_places(settings, settings.rollout_sandboxes, store, settings.sandbox) as places:
            await serve(settings, messages, store, places, health, stop)


def main() -> None:
    settings = load(RolloutSettings)
    configure_logs("rollout", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
