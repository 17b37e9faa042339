"""A topic that an operator changed or deleted on a living cluster: all goes on, or the cause and the way out are named."""

from __future__ import annotations

import asyncio
import threading
import uuid

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource
from kafka.errors import TopicAuthorizationFailedError

from shared.bus import BusUnavailable, kafka_batches
from shared.bus.kafka_admin import reach
from shared.bus.kafka_cluster import Cluster
from shared.bus.watched import AN_ANSWER, watched
from shared.contracts.messages import Alert
from shared.contracts.topics import ALERTS, Topic
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests.contract.bus_world import World, alert, go, take, texts
from tests.patience import eventually
from tests.servers import need

__all__ = ["go"]


@pytest.fixture
def world() -> World:
    prefix = f"test-{uuid.uuid4().hex[:8]}"
    return World(f"{need('ETUDE_BUS')['ETUDE_BUS']}/{prefix}", Topic("settings", (Alert,), partitions=1), [])


def change(world: World, topic: Topic, **settings: str) -> None:
    cluster = Cluster.parse(world.url)
    admin = KafkaAdminClient(**cluster.options())
    try:
        changed = {name.replace("_", "."): value for name, value in settings.items()}
        admin.alter_configs([ConfigResource("TOPIC", cluster.physical(topic.name), configs=changed)])
    finally:
        admin.close()


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


def delete(world: World, topic: Topic) -> None:
    cluster = Cluster.parse(world.url)
    admin = KafkaAdminClient(**cluster.options())
    try:
        admin.delete_topics([cluster.physical(topic.name)])
    finally:
        admin.close()


def test_a_topic_that_is_deleted_under_living_clients_is_made_again(world, go):
    async def scenario() -> None:
        bus = world.open()
        reading = bus.deliveries([world.topic], world.group, 10)
        await bus.publish(world.topic, "k", alert("before"))
        (before,) = await take(reading, 1)
        before.done()
        for n in range(2):
            delete(world, world.topic)
            await bus.publish(world.topic, "k", alert(n))
            (got,) = await take(reading, 1)
            assert texts([got]) == [str(n)]
            got.done()
        await bus.ping()

    go(scenario)


def test_a_publication_that_waits_for_its_topic_holds_up_no_other_topic(world, go, monkeypatch):
    async def scenario() -> None:
        bus = world.open()
        slow = Topic("slow", (Alert,), partitions=1)
        await bus.publish(world.topic, "k", alert("the topic is there"))
        ensure, go_on = bus._ensure, threading.Event()

        def waits(topics: list[Topic]) -> list[str]:
            go_on.wait()
            return ensure(topics)

        monkeypatch.setattr(bus, "_ensure", waits)
        held = asyncio.create_task(bus.publish(slow, "k", alert("late")))
        try:
            await bus.publish(world.topic, "k", alert("at once"))
            assert not held.done()
        finally:
            go_on.set()
        await held

    go(scenario)


def test_where_a_deleted_topic_may_not_be_made_ping_and_publications_say_why_until_it_is_there(world, go, monkeypatch):
    def refused(*_: object) -> None:
        raise TopicAuthorizationFailedError(["settings"])

    async def says(bus, words: str) -> bool:
        try:
            await bus.ping()
        except BusUnavailable as error:
            return words in str(error)
        return False

    async def scenario() -> None:
        bus = world.open()
        reading = bus.deliveries([world.topic], world.group, 10)
        await bus.publish(world.topic, "k", alert("before"))
        await take(reading, 1)
        with monkeypatch.context() as patched:
            patched.setattr("shared.bus.kafka.make", refused)
            delete(world, world.topic)
            await eventually(lambda: says(bus, "settings deleted, and not made again"), "ping to name the topic")
            with pytest.raises(BusUnavailable, match="etude topics apply"):
                await bus.publish(world.topic, "k", alert("refused"))
        await bus.publish(world.topic, "k", alert("taken"))

        async def content() -> bool:
            return not await says(bus, "settings")

        await eventually(content, "ping to have nothing to say")

    go(scenario)
