"""`python -m services.trainer`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them.

Exit code 3: superseded by a newer incarnation of the same run. Starting again would take the run back.
"""

from __future__ import annotations

import asyncio
import sys

from services.trainer.checkpoints import Superseded
from services.trainer.config import TrainerSettings
from services.trainer.service import serve
from shared import objects
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining

SUPERSEDED = 3


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
    try:
        asyncio.run(run(settings))
    except Superseded as error:
        print(f"trainer: {error}", file=sys.stderr)
        raise SystemExit(SUPERSEDED) from None


if __name__ == "__main__":
    main()
