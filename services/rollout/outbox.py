"""Messages out, in batches: one durable write for whatever several attempts said within a few milliseconds.

Invariant: `send` returns only when the message is durable on the bus. While the bus is away it waits, and says so.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import structlog

from shared.bus import Bus
from shared.contracts.codec import MessageTooLarge
from shared.contracts.topics import Topic
from shared.telemetry import Health

LINGER_S = 0.005
LAST_DELAY_S = 5.0

log = structlog.get_logger()
_Item = tuple[Topic, str, msgspec.Struct]


class Outbox:
    def __init__(self, bus: Bus, health: Health) -> None:
        self._bus = bus
        self._health = health
        self._waiting: list[tuple[_Item, asyncio.Future[None]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def send(self, topic: Topic, key: str, message: msgspec.Struct) -> None:
        """Raises TypeError or MessageTooLarge for a message that the topic can never carry."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((topic, key, message), future))
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await future

    async def _flush(self) -> None:
        """One batch after another, so that order within a key holds; ends when nothing waits."""
        try:
            while self._waiting:
                await asyncio.sleep(LINGER_S)
                batch, self._waiting = self._waiting, []
                await self._publish(batch)
        finally:
            self._flushing = None

    async def _publish(self, batch: list[tuple[_Item, asyncio.Future[None]]]) -> None:
        delay = 0.1
        while True:
            try:
                await self._bus.publish_many([item for item, _ in batch])
            except (TypeError, MessageTooLarge) as error:
                if len(batch) == 1:
                    _settle(batch[0][1], error)
                    return
                for one in batch:  # find the one that cannot be sent; the others must not suffer
                    await self._publish([one])
                return
            except Exception as error:
                log.warning("bus_unavailable", error=f"{type(error).__name__}: {error}", messages=len(batch))
                self._health.wait_on("the bus")
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(LAST_DELAY_S, delay * 2)
                continue
            self._health.clear("the bus")
            for _, future in batch:
                _settle(future)
            return


def _settle(future: asyncio.Future[None], error: Exception | None = None) -> None:
    if not future.done():
        future.set_exception(error) if error else future.set_result(None)
