"""A service's bus: opened, asked every few seconds whether it answers, closed.

Who only listens cannot tell a bus that is silent from one that is away: nothing comes in both cases. So it is asked, and
`/readyz` says since when it has not answered. Nothing is decided by it: reading and publishing go on trying by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import structlog

from shared.bus import Bus, BusUnavailable, connect
from shared.telemetry import Health

ASK_EVERY_S, WITHIN_S = 5.0, 5.0
AN_ANSWER = "an answer of the bus"

log = structlog.get_logger()


@contextlib.asynccontextmanager
async def opened(url: str, health: Health) -> AsyncIterator[Bus]:
    """See `shared.bus.connect`, which says what it raises."""
    bus = connect(url, client=health.name)
    try:
        async with watched(bus, health):
            yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def watched(bus: Bus, health: Health) -> AsyncIterator[None]:
    watching = asyncio.create_task(_watch(bus, health))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(bus: Bus, health: Health) -> None:
    health.wait_on(AN_ANSWER)
    silent = False
    while True:
        try:
            async with asyncio.timeout(WITHIN_S):
                await bus.ping()
            health.clear(AN_ANSWER)
            silent = False
        except Exception as error:  # whatever it is: a watch that ends would leave its last word standing
            health.wait_on(AN_ANSWER)
            if not silent:
                known = isinstance(error, BusUnavailable | TimeoutError)
                log.warning("bus_silent", error=str(error) or f"no answer within {WITHIN_S:.0f} s", exc_info=not known)
            silent = True
        await asyncio.sleep(ASK_EVERY_S)
