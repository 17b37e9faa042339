"""`python -m services.scheduler`: migrates the ledger, then schedules until SIGTERM."""

from __future__ import annotations

import asyncio

from services.scheduler import api, service
from services.scheduler.config import SchedulerConfig
from shared import ledger
from shared import objects as stores
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def main(config: SchedulerConfig) -> None:
    async with Health("scheduler", config, api.app(config)) as health, draining() as stop:
        health.wait_on("the ledger's migrations")
        engine = ledger.connect(config.ledger_url)
        await asyncio.to_thread(ledger.upgrade, engine)
        health.clear("the ledger's migrations")
        try:
            async with opened(config.bus_url, health) as bus:
                await service.serve(config, engine, bus, stores.connect(config.objects_url), health, stop)
        finally:
            engine.dispose()


if __name__ == "__main__":
    settings = load(SchedulerConfig)
    configure_logs("scheduler", settings)
    asyncio.run(main(settings))
