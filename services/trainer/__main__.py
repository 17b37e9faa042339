"""`python -m services.trainer`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

from services.trainer.config import TrainerSettings
from services.trainer.service import serve
from shared import objects
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: TrainerSettings) -> None:
    async with (
        draining() as stop,
        Health("trainer", settings) as health,
        opened(settings.bus_url, health) as messages,
    ):
        await serve(settings, messages, objects.connect(settings.objects_url), health, stop)


def main() -> None:
    settings = load(TrainerSettings)
    configure_logs("trainer", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
