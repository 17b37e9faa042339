"""`python -m services.curator`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

from services.curator.config import CuratorConfig
from services.curator.service import serve
from shared import objects, sandbox
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: CuratorConfig) -> None:
    async with (
        draining() as stop,
        Health("curator", settings) as health,
        opened(settings.bus_url, health) as messages,
    ):
        functions = sandbox.connect(settings.sandbox, settings.curator_sandboxes)
        try:
            await serve(settings, messages, objects.connect(settings.objects_url), functions, health, stop)
        finally:
            await functions.close()


def main() -> None:
    settings = load(CuratorConfig)
    configure_logs("curator", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
