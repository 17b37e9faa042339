"""Looks at the services and at the bus when somebody looks at the page: at most every few seconds, whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp

from services.console.flow import Snapshot
from services.console.lag import Lags
from services.console.neighbours import survey
from shared.settings import ServiceSettings

FRESH_S = 3.0
PATIENCE_S = 2.0  # a page does not wait longer; it shows what was found before
FIRST_S = 10.0  # before the first look there is nothing to show


class Watcher:
    """`before` and `now`: the last two looks, from which rates follow."""

    def __init__(self, settings: ServiceSettings, lags: Lags) -> None:
        self.now, self.before = Snapshot(0.0), Snapshot(0.0)
        self._settings, self._lags = settings, lags
        self._looking: asyncio.Task[None] | None = None

    async def look(self, http: aiohttp.ClientSession) -> tuple[Snapshot, Snapshot | None]:
        """(now, before); before is None until there were two looks."""
        self._begin(http)
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=PATIENCE_S if self.now.at else FIRST_S)
        return self.now, self.before if self.before.at else None

    def glance(self, http: aiohttp.ClientSession) -> Snapshot:
        """What the last look found, at once: for a page that must not wait. A new look begins where that is old."""
        self._begin(http)
        return self.now

    def _begin(self, http: aiohttp.ClientSession) -> None:
        if (self._looking is None or self._looking.done()) and time.monotonic() - self.now.at > FRESH_S:
            self._looking = asyncio.create_task(self._look(http))

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def _look(self, http: aiohttp.ClientSession) -> None:
        neighbours, _ = await asyncio.gather(survey(http, self._settings), self._lags.look())
        self.before, self.now = self.now, Snapshot(time.monotonic(), tuple(neighbours), self._lags.known)
