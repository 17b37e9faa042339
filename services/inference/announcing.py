"""What a replica tells everybody of itself (policies.applied)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog

from services.inference.candidates import delay_after
from shared.bus import Bus, BusUnavailable
from shared.contracts.messages import PolicyApplied
from shared.contracts.topics import POLICIES_APPLIED
from shared.telemetry import Health

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Announcing:
    """`health`: of this replica, with its name and address."""

    bus: Bus
    health: Health
    pool: str

    async def say(self, run: str, serial: int, reason: str, **said: Any) -> None:
        """Returns when it was said, however long the bus is away: the engine serves on meanwhile. `said`: further fields of
        PolicyApplied."""
        message = PolicyApplied(
            run=run,
            replica=self.health.name,
            url=self.health.url,
            pool=self.pool,
            serial=serial,
            reason=reason[:2000],
            **said,
        )
        while True:
            try:
                return await self.bus.publish(POLICIES_APPLIED, self.health.name, message)
            except BusUnavailable as error:
                log.warning("bus_unavailable", error=str(error))
                await asyncio.sleep(delay_after(1))
