"""Messages of the trainer on their way to the bus."""

from __future__ import annotations

import asyncio
import random

import structlog

from services.trainer import metrics
from services.trainer.persistence import FIRST_DELAY_S, LAST_DELAY_S
from services.trainer.training import Announcement
from shared.bus import Bus, BusUnavailable
from shared.contracts.messages import Alert, GroupQuarantined
from shared.telemetry import Health

THE_BUS = "the bus"
log = structlog.get_logger()


class Announce:
    def __init__(self, bus: Bus, health: Health, stop: asyncio.Event) -> None:
        self.bus, self.health, self.stop = bus, health, stop

    async def __call__(self, messages: list[Announcement]) -> None:
        """Durable when it returns. A bus that is away is waited for: to die of it would cost the steps since the last
        checkpoint. Raises BusUnavailable once we are told to stop; the next life says again what was not said."""
        delay = FIRST_DELAY_S
        while True:
            try:
                await self.bus.publish_many([(topic, message.run, message) for topic, message in messages])  # type: ignore[attr-defined]
                break
            except BusUnavailable as error:
                if self.stop.is_set():
                    raise
                self.health.wait_on(THE_BUS)
                log.warning("bus_unavailable", error=str(error), again_in_s=delay)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(LAST_DELAY_S, 2 * delay)
        self.health.clear(THE_BUS)
        for _, message in messages:
            if isinstance(message, GroupQuarantined):
                metrics.QUARANTINED.labels(message.run).inc()
                log.warning("group_quarantined", group=message.group, reason=message.reason)
            elif isinstance(message, Alert):
                log.error(message.name, what=message.what, examples=message.examples)
