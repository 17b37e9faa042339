"""A service's bus: opened, asked every few seconds whether it answers (see shared.watch), closed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from shared import watch
from shared.bus import Bus, BusUnavailable, connect
from shared.telemetry import Health

AN_ANSWER = "an answer of the bus"


@contextlib.asynccontextmanager
async def opened(url: str, health: Health) -> AsyncIterator[Bus]:
    """See `shared.bus.connect`, which says what it raises."""
    bus = connect(url, client=health.name)
    try:
        async with watched(bus, health):
            yield bus
    finally:
        await bus.close()


def watched(bus: Bus, health: Health) -> contextlib.AbstractAsyncContextManager[None]:
    return watch.watched(health, AN_ANSWER, bus.ping, (BusUnavailable,))
