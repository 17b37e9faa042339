"""What every bus promises while its log is away: killed, frozen or locked. The broker is of these tests alone."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.servers import fleet, state
from shared import watch
from shared.bus import BusUnavailable, kafka, sqlite_store
from shared.bus.watched import opened
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests.contract.bus_world import World, alert, drained, go, take, texts
from tests.patience import eventually, patient, quiet
from tests.servers import need

__all__ = ["go"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    need("ETUDE_BUS")  # its programs are here
    folder = tmp_path_factory.mktemp("broker") / "servers"
    try:
        fleet.up(["kafka"], folder)
        yield folder
    finally:
        fleet.down(folder)


@pytest.fixture(params=["sqlite", "kafka"])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(sqlite_store, "BUSY_S", 3.0)  # longer than what gives up first here
    topic = Topic(f"test.{uuid.uuid4().hex[:12]}", (Alert,), partitions=8)
    if request.param == "sqlite":
        return World(f"sqlite:{tmp_path / 'bus.db'}", topic, [])
    folder = request.getfixturevalue("broker")
    return World(state.settings(folder)["ETUDE_BUS"], topic, [], servers=folder)


def test_a_log_that_is_away_for_a_while_loses_nothing_that_was_durable(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(10)])
        deliveries = bus.deliveries([world.topic], world.group, 100)
        got = await take(deliveries, 5)
        for delivery in got:
            delivery.done()
        durable: set[str] = set()

        async def publish():
            for i in range(10, 40):
                while str(i) not in durable:
                    try:
                        await bus.publish(world.topic, str(i), alert(i))
                        durable.add(str(i))
                    except BusUnavailable:
                        await asyncio.sleep(0.1)

        publishing = asyncio.create_task(publish())
        async with world.away():
            await quiet(2.0, "the log is away for so long, and nothing is lost")
        seen = set(texts(got))
        while len(seen) < 40:
            delivery = await anext(deliveries)
            seen.add(delivery.message.what)
            delivery.done()
        await publishing
        await drained(bus, world.topic, world.group, deliveries)

    go(scenario)


def test_after_a_hang_that_outlasts_the_patience_of_publishers_they_publish_again(world, go, monkeypatch):
    """What fails first must not keep what else hangs from being given up: a producer has batches for many partitions."""
    monkeypatch.setattr(kafka, "PUBLISH_WITHIN_MS", 3_000)

    async def scenario():
        bus = world.open()
        await bus.publish(world.topic, "k", alert("before"))
        async with world.away(frozen=True):
            for _ in range(1 if world.embedded else 3):  # which waits for a lock
                with pytest.raises(BusUnavailable):
                    await bus.publish_many([(world.topic, str(i), alert("meanwhile")) for i in range(32)])
        while True:
            try:
                await bus.publish(world.topic, "k", alert("after"))
                break
            except BusUnavailable:
                await asyncio.sleep(0.1)
        seen = set()
        deliveries = bus.deliveries([world.topic], world.group, 10)
        while "after" not in seen:
            delivery = await anext(deliveries)
            seen.add(delivery.message.what)
            delivery.done()

    go(scenario)


def test_a_lag_that_cannot_be_told_is_refused_soon_and_holds_no_thread(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(3)])
        deliveries = bus.deliveries([world.topic], world.group, 10)
        got = await take(deliveries, 3)
        async with world.away():
            for delivery in got:
                delivery.done()
            impatient = [asyncio.wait_for(bus.lag([world.topic], world.group), 1.0) for _ in range(40)]
            assert {type(e) for e in await asyncio.gather(*impatient, return_exceptions=True)} == {TimeoutError}
            async with asyncio.timeout(patient(2.0)):
                await asyncio.to_thread(lambda: None)  # the threads that every service shares are free
            with pytest.raises(BusUnavailable):
                async with asyncio.timeout(
                    patient(40.0)
                ):  # the embedded bus waits for a lock, and may have begun before
                    await bus.lag([world.topic], world.group)
        await drained(bus, world.topic, world.group, deliveries)

    go(scenario)


@pytest.mark.parametrize(
    ("world", "frozen"),
    [("sqlite", False), ("kafka", False), ("kafka", True)],
    indirect=["world"],
    ids=["sqlite", "kafka-stopped", "kafka-frozen"],
)
def test_a_service_says_that_its_bus_is_away_until_it_answers_again(world, go, tmp_path, monkeypatch, frozen):
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.2)

    async def scenario():
        health = Health("listener", ServiceSettings(state=tmp_path))
        async with opened(world.url, health) as bus:
            await eventually(lambda: health.ready, "a service that is ready")
            async with world.away(frozen=frozen):
                await eventually(lambda: not health.ready, "a service that misses its bus", 60)
                with pytest.raises(BusUnavailable):
                    # The embedded bus waits for a lock, and may have begun before.
                    async with asyncio.timeout(patient(40.0)):
                        await bus.ping()
            await eventually(lambda: health.ready, "a service that is ready again", 60)

    go(scenario)
