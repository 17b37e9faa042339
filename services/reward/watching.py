"""The drift watch over all replicas and restarts: it is fed from the topic of verdicts, read from its beginning.

Invariants:
- A replica's memory of a run is what the topic holds, so a restart forgets no baseline, and every replica knows the same.
- An alarm is published once. Who scored the attempt that set it off says so at once; every other replica looks a little later
  whether it was said, because it may have read the verdicts in another order, and the one that scored may have died.
- What sounded while nobody watched is said at the next start; what was said before is not said again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import msgspec
import structlog

from services.reward.monitors import DriftWatch
from shared.bus import Bus
from shared.contracts import topics
from shared.contracts.messages import Alert, RolloutScored

LOOK_AFTER_S = 3.0  # a message takes well under a second from one replica to another
KEPT = 4096  # attempts that this replica scored last

log = structlog.get_logger()
Alarm = tuple[str, str]  # run, name of the alert


class Watching:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._watch = DriftWatch()
        self._mine: dict[str, None] = {}  # attempts that this replica scored, oldest first
        self._sounded: Counter[Alarm] = Counter()  # how often an alarm was due
        self._said: Counter[Alarm] = Counter()  # the last occurrence that a replica has said, however many said it
        self._last: dict[Alarm, Alert] = {}
        self._live = False  # the past has been read
        self._looking: set[asyncio.Task[None]] = set()

    def scored(self, attempt: str) -> None:
        """Note that this replica scored the attempt."""
        self._mine[attempt] = None
        if len(self._mine) > KEPT:
            del self._mine[next(iter(self._mine))]

    async def run(self) -> None:
        """Read verdicts and alerts until cancelled."""
        verdicts = self._bus.deliveries([topics.ROLLOUTS_SCORED], None, 256)
        alerts = self._bus.deliveries([topics.ALERTS], None, 64)

        async def hear() -> None:
            async for delivery in alerts:
                delivery.done()
                alarm = (delivery.message.run, delivery.message.name)
                self._said[alarm] = max(self._said[alarm], delivery.message.occurrence)

        async def watch() -> None:
            async for delivery in verdicts:
                delivery.done()
                if isinstance(delivery.message, RolloutScored) and delivery.message.found is not None:
                    await self._observe(delivery.message)

        async def settle() -> None:
            await asyncio.gather(verdicts.caught_up(), alerts.caught_up())
            self._live = True
            for alarm in list(self._last):
                await self._say_unless_said(alarm)

        try:
            async with asyncio.TaskGroup() as group:
                for reading in (hear(), watch(), settle()):
                    group.create_task(reading)
        finally:
            for task in self._looking:
                task.cancel()
            with contextlib.suppress(Exception):
                await asyncio.gather(verdicts.aclose(), alerts.aclose())

    async def _observe(self, scored: RolloutScored) -> None:
        for alert in self._watch.observe(scored, scored.found or ()):
            alarm = (alert.run, alert.name)
            self._sounded[alarm] += 1
            self._last[alarm] = msgspec.structs.replace(alert, occurrence=self._sounded[alarm])
            if not self._live:
                continue
            if scored.key.attempt in self._mine:
                await self._say_unless_said(alarm)
            else:
                task = asyncio.create_task(self._look_later(alarm))
                self._looking.add(task)
                task.add_done_callback(self._looking.discard)

    async def _look_later(self, alarm: Alarm) -> None:
        await asyncio.sleep(LOOK_AFTER_S * random.uniform(1.0, 3.0))  # not all replicas at once
        await self._say_unless_said(alarm)

    async def _say_unless_said(self, alarm: Alarm) -> None:
        if self._said[alarm] >= self._sounded[alarm]:
            return
        alert = self._last[alarm]
        log.warning("drift", run=alert.run, alert=alert.name, what=alert.what)
        try:
            await self._bus.publish(topics.ALERTS, alert.run, alert)
        except Exception as error:  # the bus is away: the next start says it
            log.warning("alert_not_said", run=alert.run, alert=alert.name, error=f"{type(error).__name__}: {error}")
