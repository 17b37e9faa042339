"""Settings of a topic that an operator changed on a living cluster: all is read, or the cause and the way out are named."""

from __future__ import annotations

import os
import uuid

import pytest

from shared.bus import BusUnavailable, dead_letters, kafka_batches
from shared.bus.kafka_admin import reach
from shared.bus.watched import AN_ANSWER, watched
from shared.contracts.messages import Alert
from shared.contracts.topics import ALERTS, Topic
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests import topic_settings
from tests.contract.bus_world import World, alert, drained, go, take, texts
from tests.patience import eventually
from tests.servers import need

__all__ = ["go"]


@pytest.fixture
def world() -> World:
    prefix = f"test-{uuid.uuid4().hex[:8]}"
    return World(f"{need('ETUDE_BUS')['ETUDE_BUS']}/{prefix}", Topic("settings", (Alert,), partitions=1), [])


def change(world: World, topic: Topic, **settings: str) -> None:
    topic_settings.change(world.url, topic.name, {name.replace("_", "."): value for name, value in settings.items()})


def test_a_topic_is_read_whatever_it_is_compressed_with(world, go):
    async def scenario() -> None:
        bus = world.open()
        reading = bus.deliveries([world.topic], world.group, 10)
        for codec in ("lz4", "snappy", "gzip", "zstd", "uncompressed"):
            await bus.lag([world.topic], world.group)  # the topic is there
            change(world, world.topic, compression_type=codec)
            await bus.publish(world.topic, "k", alert(codec))
            (got,) = await take(reading, 1)
            assert texts([got]) == [codec]
            got.done()

    go(scenario)


def test_a_service_that_lacks_the_library_names_topic_codec_and_way_out_until_it_reads(
    world, go, monkeypatch, tmp_path
):
    async def scenario() -> None:
        bus = world.open()
        health = Health("reward", ServiceSettings(state=tmp_path))
        monkeypatch.setattr("shared.watch.ASK_EVERY_S", 0.05)
        monkeypatch.setitem(kafka_batches.READS, "lz4", lambda: False)
        await bus.lag([world.topic], world.group)
        change(world, world.topic, compression_type="lz4")
        await bus.publish(world.topic, "k", alert("at last"))
        reading = bus.deliveries([world.topic], world.group, 10)
        async with watched(bus, health):
            await eventually(lambda: health._tells.get(AN_ANSWER), "the cause in /readyz")
            said = health._tells[AN_ANSWER]
            assert not health.ready
            for part in ("settings cannot be read", world.group, "lz4", "pip install 'etude[kafka]'"):
                assert part in said
            monkeypatch.setitem(kafka_batches.READS, "lz4", lambda: True)
            assert texts(await take(reading, 1)) == ["at last"]
            await eventually(lambda: health.ready, "the service to be ready")
            assert not health._tells

    go(scenario)


def test_the_doctor_names_what_stops_a_topic_and_what_may_lose_records(world, go, monkeypatch):
    async def scenario() -> None:
        await world.open().lag([ALERTS], world.group)
        assert "declared" not in reach(world.url)
        change(world, ALERTS, retention_bytes="1000000")
        assert "alerts retention.bytes 1000000, declared -1" in reach(world.url)
        change(world, ALERTS, max_message_bytes="1000")
        with pytest.raises(
            BusUnavailable, match=r"alerts: max\.message\.bytes 1000, at least 1048588.*etude topics check"
        ):
            reach(world.url)
        change(world, ALERTS, max_message_bytes="1048588", compression_type="snappy")
        monkeypatch.setitem(kafka_batches.READS, "snappy", lambda: False)
        with pytest.raises(BusUnavailable, match=r"alerts: compression\.type snappy: .*etude\[kafka\]"):
            reach(world.url)

    go(scenario)


LIMIT = 600_000  # bytes of a batch, of a topic and its dead letters
# A foreign producer's batch of one record fits below LIMIT; with our headers, or below the smaller limit, a letter does not.
CUT = {
    "data": ("k", 599_910, {}, LIMIT),
    "data, where dead letters alone have a limit": ("k", 599_910, {}, 50_000),
    "a key": ("key" * 100_000, 200_000, {}, 50_000),
    "headers": ("k", 200_000, {f"h{i}": os.urandom(25).hex().encode() for i in range(4_000)}, 50_000),
}


@pytest.mark.parametrize("case", CUT)
def test_a_dead_letter_that_its_topic_refuses_is_cut_until_it_is_taken(world, go, case):
    key, size, headers, letters_limit = CUT[case]
    letters, data = dead_letters(world.topic), os.urandom(size)

    async def scenario() -> None:
        bus = world.open()
        await bus.lag([world.topic, letters], world.group)  # the topics are there
        change(world, letters, max_message_bytes=str(letters_limit))
        if letters_limit == LIMIT:
            change(world, world.topic, max_message_bytes=str(LIMIT))
        await world.foreign(bus, key, data, headers)
        await bus.publish(world.topic, "k", alert("good"))
        (good,) = await take(bus.deliveries([world.topic], world.group, 10), 1)
        assert texts([good]) == ["good"]
        good.done()
        await drained(bus, world.topic, world.group)
        assert await bus.lag([letters], "anybody") == {letters.name: 1}
        (letter,) = await take(bus.deliveries([letters], world.group, 10), 1)
        found = letter.message.data
        assert found
        assert data.startswith(found)
        assert key.startswith(letter.key)
        said = letter.headers["dead-letter-cut"]
        assert said.startswith(f"{size} bytes, xxh3-128 ")
        assert ("key: 300000 bytes" in said) == (case == "a key")
        assert ("headers: 4000, " in said) == (case == "headers")
        assert letter.headers["dead-letter-source"].startswith(f"{world.topic.name}/0:0/")

    go(scenario)
