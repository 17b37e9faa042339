"""A topic that somebody deletes while it is written and read: it is made again, and what comes then arrives."""

# ruff: noqa: F401, F811  (fixtures)

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.structs import OffsetAndMetadata

from shared.bus import BusUnavailable, Standing
from shared.bus.kafka_cluster import Cluster
from shared.bus.kafka_partitions import marked
from shared.contracts.messages import RECORDS_GONE
from shared.contracts.topics import ALERTS, Topic
from tests.contract.bus_world import World, alert, drained, go, take, texts, world
from tests.patience import eventually

pytestmark = pytest.mark.parametrize("world", ["kafka"], indirect=True)  # the embedded log lets nobody delete a topic


async def delete(world: World) -> None:
    """Delete the topic, and wait until the broker has forgotten it."""
    cluster = Cluster.parse(world.url)
    name = cluster.physical(world.topic.name)
    admin = await asyncio.to_thread(lambda: KafkaAdminClient(**cluster.options()))
    try:
        await asyncio.to_thread(admin.delete_topics, [name])
        await eventually(lambda: name not in admin.list_topics(), "the broker to forget the topic", 60)
    finally:
        await asyncio.to_thread(admin.close)


@pytest.mark.parametrize("in_hand", [False, True], ids=["all acknowledged", "some in hand"])
def test_what_is_published_after_a_deletion_arrives_and_no_old_position_skips_any(world, go, in_hand):
    async def scenario() -> None:
        bus, other = world.open("writer"), replace(world.topic, name=f"test.{uuid.uuid4().hex[:12]}")
        reader = world.open("reader")
        reading = reader.deliveries([world.topic], world.group, 50)
        await bus.publish_many([(world.topic, "k", alert(f"old {n}")) for n in range(3)])
        await bus.publish(other, "k", alert("other 0"))
        before = await take(reading, 3)
        if not in_hand:
            for delivery in before:
                delivery.done()
            await drained(reader, world.topic, world.group)
        await delete(world)

        # None waits until a publisher's patience has ended: that would raise.
        many = [(world.topic, "k", alert(f"new {n}")) for n in range(6)]
        await asyncio.gather(bus.publish_many(many), bus.publish(other, "k", alert("other 1")))
        if in_hand:  # positions of the old log
            for delivery in before:
                delivery.done()
        after = await take(reading, 6)
        assert texts(after) == [f"new {n}" for n in range(6)]
        for delivery in after[:4]:
            delivery.done()

        async def acknowledged() -> int:
            return sum(at.acknowledged for at in (await reader.standing([world.topic], world.group)).values())

        await eventually(lambda: is_(acknowledged, 4), "four of the new log to be acknowledged")
        await reader.close()
        left = world.open("heir").deliveries([world.topic], world.group, 50)
        assert texts(await take(left, 2)) == ["new 4", "new 5"]
        heard = bus.deliveries([ALERTS], None, 50)
        async for delivery in heard:
            if delivery.message.name == RECORDS_GONE and world.group in delivery.message.what:
                assert delivery.message.examples == [world.topic.name]
                break

    go(scenario)


async def is_(ask, expected: object) -> bool:
    return await ask() == expected


def test_a_position_that_a_member_committed_late_is_not_taken_for_one_of_the_new_log(world, go):
    """The member had not heard of the new log yet; then its partition moved. A commit's metadata names the log that it is of."""

    async def scenario() -> None:
        bus = world.open("writer")
        await bus.publish_many([(world.topic, "k", alert(n)) for n in range(5)])
        (part,) = [part for (_, part), at in (await bus.standing([world.topic], world.group)).items() if at.end]
        cluster = Cluster.parse(world.url)
        partition = TopicPartition(cluster.physical(world.topic.name), part)

        def commit(position: int, log: uuid.UUID | None) -> None:
            member = KafkaConsumer(
                **cluster.options(), group_id=cluster.physical(world.group), enable_auto_commit=False
            )
            try:
                member.assign([partition])
                member.commit({partition: OffsetAndMetadata(position, marked("", log), -1)})
            finally:
                member.close(autocommit=False)

        await asyncio.to_thread(commit, 30, uuid.uuid4())
        assert (await bus.standing([world.topic], world.group))[world.topic.name, part] == Standing(5, 5)
        # Without a name it is believed, as an earlier release wrote it.
        for log, first in ((uuid.uuid4(), 0), (None, 3)):
            await asyncio.to_thread(commit, 3, log)
            reader = world.open("reader")
            got = await take(reader.deliveries([world.topic], world.group, 50), 5 - first)
            assert texts(got) == [str(n) for n in range(first, 5)]
            await reader.close()

    go(scenario)


def test_a_reader_of_everything_reads_the_new_log_from_its_beginning(world, go):
    async def scenario() -> None:
        bus = world.open()
        reading = bus.deliveries([world.topic], None, 50)
        await bus.publish_many([(world.topic, "k", alert(f"old {n}")) for n in range(5)])
        for delivery in await take(reading, 5):
            delivery.done()
        await reading.caught_up()
        await delete(world)
        for n in range(7):  # more than the old log held: its last position is one of the new log too
            await bus.publish(world.topic, "k", alert(f"new {n}"))
        assert texts(await take(reading, 7)) == [f"new {n}" for n in range(7)]

    go(scenario)


def test_who_asks_how_far_a_group_is_finds_an_empty_topic_in_place_of_a_deleted_one(world, go):
    async def scenario() -> None:
        bus = world.open()
        await bus.publish(world.topic, "k", alert("old"))
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 1}
        await delete(world)

        async def asked() -> bool:
            try:
                found = await bus.standing([world.topic], world.group)
            except BusUnavailable:  # said once
                return False
            return set(found.values()) == {Standing(0, 0)}

        await eventually(asked, "the topic to be made again")

    go(scenario)
