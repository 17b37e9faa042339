"""`python -m services.evaluator`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

from services.evaluator.config import EvaluatorSettings
from services.evaluator.service import serve
from shared import objects
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: EvaluatorSettings) -> None:
    async with (
        draining() as stop,
        Health("evaluator", settings) as health,
        opened(settings.bus_url, health) as messages,
    ):
        await serve(settings, messages, objects.connect(settings.objects_url), health, stop)


def main() -> None:
    settings = load(EvaluatorSettings)
    configure_logs("evaluator", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
