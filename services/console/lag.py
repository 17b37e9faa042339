"""How far each group of consumers is behind: asked of the bus now and then, for the flow picture and for Prometheus.

The console asks for every group: consumers that have died say nothing of themselves, and those that wait to be started (KEDA)
cannot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog
from prometheus_client import Gauge

from shared.bus import Bus
from shared.contracts.topics import ACCESS

EVERY_S = 10.0  # two scrapes
FIRST_S = 0.5  # until there is a bus to ask
WITHIN_S = 10.0

LAG = Gauge(
    "etude_bus_lag_messages",
    "Messages of a topic that a group of consumers has not acknowledged; as the console last found it.",
    ["topic", "group"],
)

log = structlog.get_logger()


class Lags:
    """`known`: (topic, group) -> messages; empty while the bus does not say, so that no old count is taken for a new one."""

    def __init__(self, opened: Callable[[], Bus | None]) -> None:
        """`opened`: None while there is no bus yet."""
        self._opened = opened
        self.known: Mapping[tuple[str, str], int] = {}

    async def look(self) -> None:
        bus, found = self._opened(), dict[tuple[str, str], int]()
        if bus is None:
            return
        for group, topics in ACCESS["console"].counts.items():
            try:
                async with asyncio.timeout(WITHIN_S):
                    found |= {(name, group): lag for name, lag in (await bus.lag(topics, group)).items()}
            except TimeoutError:  # the others would not be told either
                log.info("lag_unknown", group=group, error=f"no answer within {WITHIN_S:g} s")
                found = {}
                break
            except Exception as error:  # each adapter has its own; a right that is missing is one group's matter
                log.info("lag_unknown", group=group, error=f"{type(error).__name__}: {error}")
        for pair in self.known.keys() - found.keys():
            LAG.remove(*pair)
        for pair, lag in found.items():
            LAG.labels(*pair).set(lag)
        self.known = found

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S if self._opened() else FIRST_S)
