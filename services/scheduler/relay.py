"""Publishes what was committed. In order per run, at least once: a crash between publishing and marking publishes again,
and every reader recognises what it has seen."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable

import structlog

from services.scheduler.records import Message
from shared.bus import Bus, BusUnavailable

log = structlog.get_logger()

CHUNK = 512  # messages per publish_many
FIRST_DELAY_S, LAST_DELAY_S = 0.2, 10.0


class Relay:
    """What the ledger holds as pending is added first. Marks are not written at once but handed to the next transaction
    (`marks`): one less per batch."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._queue: deque[tuple[str, Message]] = deque()
        self._queued: dict[str, int] = {}  # run -> last sequence that is queued or published
        self._marks: dict[str, int] = {}
        self._delay_s = 0.0

    def add(self, messages: Iterable[tuple[str, Message]]) -> None:
        """Queues them; those known already are passed over."""
        for run, message in messages:
            if message.sequence > self._queued.get(run, 0):
                self._queued[run] = message.sequence
                self._queue.append((run, message))

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def publish(self) -> bool:
        """Everything queued. False: the bus is away; what is left stays queued, and the caller comes again later. Whatever
        else is raised is a defect, which no waiting mends."""
        if self._queue and self._delay_s:
            await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))  # not all come back at once
        while self._queue:
            chunk = [self._queue[i] for i in range(min(CHUNK, len(self._queue)))]
            try:
                await self._bus.publish_many([(one.topic, one.key, one.message) for _, one in chunk])
            except BusUnavailable as error:
                self._delay_s = min(LAST_DELAY_S, max(FIRST_DELAY_S, 2 * self._delay_s))
                log.warning("bus_unavailable", waiting=len(self._queue), error=str(error), again_in_s=self._delay_s)
                return False
            self._delay_s = 0.0
            for run, one in chunk:
                self._queue.popleft()
                self._marks[run] = one.sequence
        return True

    def marks(self) -> dict[str, int]:
        """Per run, how far the outbox is published and not marked yet."""
        return dict(self._marks)

    def marked(self, marks: dict[str, int]) -> None:
        for run, sequence in marks.items():
            if self._marks.get(run) == sequence:
                del self._marks[run]
