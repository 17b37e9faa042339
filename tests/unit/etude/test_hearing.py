"""What commands hear of the bus: all of the past first, then what comes; and why they hear no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude import hearing
from etude.hearing import Hearing
from shared import bus as buses
from shared.bus import Bus, BusUnavailable
from shared.contracts import topics as t
from shared.contracts.messages import Alert


def alert(what: str) -> Alert:
    return Alert(run="r", name="n", severity="info", what=what)


def on_a_bus(tmp_path: Path, story: Callable[[Bus], Awaitable[None]]) -> None:
    async def scenario() -> None:
        bus = buses.connect(f"sqlite:{tmp_path / 'bus.db'}", client="test")
        try:
            await story(bus)
        finally:
            await bus.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_past_is_heard_before_it_begins_and_news_follow(tmp_path: Path) -> None:
    async def story(bus: Bus) -> None:
        heard: list[tuple[str, float]] = []
        await bus.publish_many([(t.ALERTS, "r", alert(str(i))) for i in range(3000)])
        async with Hearing(bus, [t.ALERTS], lambda message, at: heard.append((message.what, at))) as listening:
            assert [what for what, _ in heard] == [str(i) for i in range(3000)]
            assert all(at > 1e9 for _, at in heard)
            assert not await listening.until(lambda: len(heard) > 3000, 0.2)
            await bus.publish(t.ALERTS, "r", alert("new"))
            assert await listening.until(lambda: len(heard) > 3000, 30)
            assert heard[-1][0] == "new"

    on_a_bus(tmp_path, story)


@pytest.mark.parametrize("past", [True, False])
def test_what_the_listener_cannot_take_is_raised_where_it_waits(tmp_path: Path, past: bool) -> None:
    def hear(message: Alert, at: float) -> None:
        raise ZeroDivisionError(message.what)

    async def story(bus: Bus) -> None:
        if past:
            await bus.publish(t.ALERTS, "r", alert("old"))
            with pytest.raises(ZeroDivisionError, match="old"):
                async with Hearing(bus, [t.ALERTS], hear):
                    pass
            return
        async with Hearing(bus, [t.ALERTS], hear) as listening:
            await bus.publish(t.ALERTS, "r", alert("new"))
            with pytest.raises(ZeroDivisionError, match="new"):
                await listening.until(lambda: False, 30)

    on_a_bus(tmp_path, story)


def test_a_bus_that_is_silent_in_the_middle_of_its_past_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hearing, "SILENT_S", 0.2)

    class Silent:
        def __aiter__(self) -> Silent:
            return self

        async def __anext__(self) -> None:
            await asyncio.Event().wait()

        async def caught_up(self) -> None:
            await asyncio.Event().wait()

    async def story(bus: Bus) -> None:
        monkeypatch.setattr(bus, "deliveries", lambda *_: Silent())
        with pytest.raises(BusUnavailable, match="tells its past no further"):
            async with Hearing(bus, [t.ALERTS], lambda message, at: None):
                pass

    on_a_bus(tmp_path, story)
