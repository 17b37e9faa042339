"""What the relay waits out, and what it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.scheduler.records import Message
from services.scheduler.relay import Relay
from shared import bus as buses
from shared.contracts import topics as t
from shared.contracts.messages import Alert, RunCommand
from tests.unit.scheduler.world import RUN

ALERT = Alert(run=RUN, name="replica_lags", severity="warning", what="it lags")


def test_while_the_bus_is_away_what_is_queued_stays_and_nothing_is_marked(tmp_path: Path) -> None:
    async def story() -> None:
        bus = buses.connect(f"sqlite:{tmp_path / 'bus.sqlite'}", client="test")
        relay = Relay(bus)
        relay.add([(RUN, Message(1, t.ALERTS, RUN, ALERT))])
        await bus.close()
        assert await relay.publish() is False
        assert (relay.waiting, relay.marks()) == (1, {})

    asyncio.run(story())


def test_a_defect_ends_the_scheduler_instead_of_being_taken_for_an_outage_for_ever(tmp_path: Path) -> None:
    async def story() -> None:
        bus = buses.connect(f"sqlite:{tmp_path / 'bus.sqlite'}", client="test")
        try:
            relay = Relay(bus)
            relay.add([(RUN, Message(1, t.ALERTS, RUN, RunCommand(run=RUN, action="pause")))])
            with pytest.raises(TypeError, match="topic alerts carries Alert, not RunCommand"):
                await relay.publish()
        finally:
            await bus.close()

    asyncio.run(story())
