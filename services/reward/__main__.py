"""`python -m services.reward`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them."""

from __future__ import annotations

import asyncio

from services.reward.config import RewardSettings
from services.reward.graders import CeleryJobs
from services.reward.service import serve
from shared import objects
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: RewardSettings) -> None:
    async with (
        draining() as stop,
        Health("reward", settings) as health,
        opened(settings.bus_url, health) as messages,
    ):
        jobs = CeleryJobs(settings.jobs_url)
        try:
            await serve(settings, messages, objects.connect(settings.objects_url), jobs, health, stop)
        finally:
            await jobs.close()


def main() -> None:
    settings = load(RewardSettings)
    configure_logs("reward", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
