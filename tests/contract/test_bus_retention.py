"""Retention passes a reader that is away: nobody may take the gap for an empty log."""

# ruff: noqa: F401, F811  (fixtures)

from __future__ import annotations

import contextlib
import sqlite3
import time

import pytest
from kafka import KafkaAdminClient, TopicPartition
from kafka.errors import KafkaError
from prometheus_client import REGISTRY

from shared.bus.kafka_cluster import Cluster
from shared.bus.sqlite import SqliteBus
from shared.contracts.messages import EVERY_RUN, RECORDS_GONE
from shared.contracts.topics import ALERTS
from tests.contract.bus_world import World, alert, go, world
from tests.patience import eventually


def counted(world: World) -> float:
    labels = {"topic": world.topic.name, "group": world.group}
    return REGISTRY.get_sample_value("etude_bus_records_gone_total", labels) or 0.0


async def expire(world: World, keep: int) -> None:
    """Retention deletes all but the newest `keep` records of the topic."""
    if world.embedded:
        name = world.url.removeprefix("sqlite:")
        with contextlib.closing(sqlite3.connect(name)) as db, db:
            db.execute(
                "UPDATE messages SET at = :at WHERE topic = :t AND offset NOT IN "
                "(SELECT offset FROM messages WHERE topic = :t ORDER BY offset DESC LIMIT :keep)",
                {"t": world.topic.name, "at": time.time() - world.topic.retention_h * 3600 - 60, "keep": keep},
            )
        bus = world.open("purger")
        assert isinstance(bus, SqliteBus)
        await bus.purge()
        return
    cluster = Cluster.parse(world.url)
    admin = KafkaAdminClient(**cluster.options())
    try:
        bus = world.open("asker")
        ends = await bus.standing([world.topic], world.group)
        (part,) = [part for (_, part), at in ends.items() if at.end]
        end = ends[world.topic.name, part].end
        admin.delete_records({TopicPartition(cluster.physical(world.topic.name), part): end - keep})
    finally:
        admin.close()


@pytest.mark.parametrize("read", [0, 5])
def test_a_reader_that_was_away_says_how_many_records_of_which_topic_retention_deleted(world, go, read):
    async def scenario() -> None:
        bus = world.open("first")
        reading = bus.deliveries([world.topic], world.group, 50)
        await bus.publish_many([(world.topic, "k", alert(n)) for n in range(read)])
        for _ in range(read):
            (await anext(reading)).done()
        if not read:  # the group has taken part, and had nothing to acknowledge yet
            await eventually(lambda: joined(world), "the group's place in the log")
        await bus.close()

        bus = world.open("second")
        await bus.publish_many([(world.topic, "k", alert(n)) for n in range(50)])
        await expire(world, 15)
        before = counted(world)
        alerts = bus.deliveries([ALERTS], None, 50)
        reading = bus.deliveries([world.topic], world.group, 50)
        seen = [(await anext(reading)).message.what for _ in range(15)]
        assert seen == [str(n) for n in range(35, 50)]
        async for told in alerts:
            if told.message.name == RECORDS_GONE and world.group in told.message.what:
                break
        assert told.message.run == EVERY_RUN
        assert f"35 records of {world.topic.name} no longer exist" in told.message.what
        assert counted(world) == before + 35

    async def joined(world: World) -> bool:
        if world.embedded:
            with contextlib.closing(sqlite3.connect(world.url.removeprefix("sqlite:"))) as db:
                return bool(db.execute("SELECT 1 FROM groups WHERE grp = ?", (world.group,)).fetchone())
        cluster = Cluster.parse(world.url)
        admin = KafkaAdminClient(**cluster.options())
        try:
            group = cluster.physical(world.group)
            try:
                offsets = admin.list_group_offsets({group: None})[group]
            except KafkaError:  # a fresh broker's first group has no coordinator for some seconds
                return False
            return sum(at.offset == 0 for at in offsets.values()) == world.topic.partitions
        finally:
            admin.close()

    go(scenario)


def test_a_new_group_that_finds_the_log_begun_late_misses_nothing(world, go):
    async def scenario() -> None:
        bus = world.open("first")
        await bus.publish_many([(world.topic, "k", alert(n)) for n in range(50)])
        await expire(world, 15)
        reading = bus.deliveries([world.topic], world.group, 50)
        for _ in range(15):
            (await anext(reading)).done()
        await bus.close()
        assert counted(world) == 0

    go(scenario)
