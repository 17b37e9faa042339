"""Listening to what is said on the bus, from the beginning on: for commands that tell or copy, and are no service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shared import bus as buses
from shared.bus import Bus, BusUnavailable
from shared.contracts.codec import sent_at
from shared.contracts.topics import Topic
from shared.settings import ServiceSettings, path_and_options

ANSWER_WITHIN_S = 30.0
SILENT_S = 30.0  # while the past is read, which may take long: a year of messages on a slow broker


def embedded(settings: ServiceSettings) -> Path | None:
    """The bus's file; None: the bus is a server."""
    scheme, _, rest = settings.bus_url.partition(":")
    return Path(path_and_options(rest)[0]) if scheme == "sqlite" else None


def silent(settings: ServiceSettings) -> bool:
    """Nobody has said anything: the bus is a file, and there is none. Whoever only looks makes none: a folder that holds a bus
    is a platform's, in which `etude demo` begins nothing."""
    file = embedded(settings)
    return file is not None and not file.exists()


async def past(
    settings: ServiceSettings, topics: Sequence[Topic], hear: Callable[[Any, float], None], *, client: str
) -> None:
    """Gives everything that was said to `hear`, as Hearing does, and ends. Raises BusUnavailable."""
    if silent(settings):
        return
    bus = buses.connect(settings.bus_url, client=client)
    try:
        async with Hearing(bus, topics, hear):
            pass
    finally:
        await bus.close()


class Hearing:
    """Use with `async with`: it begins when everything that was said has been given to `hear` (a message, and when it was
    sent: Unix seconds by the sender's clock, 0 where it does not say), and goes on listening. Raises BusUnavailable."""

    def __init__(self, bus: Bus, topics: Sequence[Topic], hear: Callable[[Any, float], None]) -> None:
        self._bus, self._topics, self._hear = bus, topics, hear
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._bus.ping()
        except TimeoutError:
            raise BusUnavailable(f"the bus has not answered within {ANSWER_WITHIN_S:.0f} s") from None
        deliveries = self._bus.deliveries(self._topics, None, 1024)
        self._task = asyncio.create_task(self._listen(deliveries))
        past = asyncio.create_task(deliveries.caught_up())
        try:
            while not past.done():
                self._news.clear()
                await asyncio.wait((past, self._task), timeout=SILENT_S, return_when=asyncio.FIRST_COMPLETED)
                if self._task.done():
                    self._ended()
                if not past.done() and not self._news.is_set():
                    raise BusUnavailable(f"the bus tells its past no further: nothing for {SILENT_S:.0f} s")
            past.result()
        except BaseException:
            await self._end()
            raise
        finally:
            past.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self, deliveries: Any) -> None:
        async for delivery in deliveries:
            self._hear(delivery.message, sent_at(delivery.headers))
            delivery.done()
            self._news.set()

    async def news(self) -> None:
        """Returns when something was said since this was last called. Raises BusUnavailable, and what `hear` raised."""
        assert self._task is not None
        waiting = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        self._news.clear()
        if self._task.done():
            self._ended()

    def _ended(self) -> None:
        """Raises why the reading has ended."""
        assert self._task is not None
        self._task.result()
        raise BusUnavailable("the bus ended the reading")

    async def until(self, there: Callable[[], bool], within_s: float) -> bool:
        """Whether it came to be in time."""
        until = asyncio.get_running_loop().time() + within_s
        while not there():
            try:
                async with asyncio.timeout_at(until):
                    await self.news()
            except TimeoutError:
                return there()
        return True
