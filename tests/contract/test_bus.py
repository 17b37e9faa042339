"""What every bus promises. Runs on the embedded adapter, and on Kafka (tests/servers.py). Faults: test_bus_faults.py."""

from __future__ import annotations

import asyncio
import signal

import msgspec
import pytest
from prometheus_client import REGISTRY

from shared.bus import BusUnavailable, Delivery, dead_letters
from shared.bus.batching import batches
from shared.contracts.codec import MAX_BYTES, MessageTooLarge, Raw
from shared.contracts.messages import Alert, RunCommand
from shared.contracts.topics import Topic
from tests.contract.bus_world import World, alert, go, nothing_comes, take, texts, world
from tests.patience import patient, quiet

__all__ = ["go", "world"]


def test_what_is_published_arrives_unchanged_and_once(world, go):
    async def scenario():
        bus = world.open()
        sent = Alert(run="r1", name="drift", severity="critical", what="héllo \x00 \u202e", examples=["a", "b"])
        kept = msgspec.structs.replace(sent, what="héllo ␀ \u202e")  # no store of ours keeps NUL (shared.storable)
        await bus.publish(world.topic, "key", sent)
        deliveries = bus.deliveries([world.topic], world.group, 4)
        (got,) = await take(deliveries, 1)
        assert (got.message, got.key, got.topic) == (kept, "key", world.topic)
        got.done()
        assert await nothing_comes(deliveries)

    go(scenario)


def test_a_key_that_utf_8_does_not_have_is_the_text_that_readers_find_in_the_message(world, go):
    """A command line whose bytes are no UTF-8 brings such a name."""

    async def scenario():
        bus = world.open()
        name = "r-\ud800"
        await bus.publish(world.topic, name, Alert(run=name, name="drift", severity="info", what=""))
        (got,) = await take(bus.deliveries([world.topic], world.group, 4), 1)
        assert got.key == got.message.run == "r-\ufffd"
        got.done()

    go(scenario)


def test_order_holds_per_key_across_publishers(world, go):
    async def scenario():
        one, two = world.open("one"), world.open("two")

        async def publish(bus, key):
            for i in range(60):
                await bus.publish(world.topic, key, alert(i))

        await asyncio.gather(publish(one, "a"), publish(one, "b"), publish(two, "c"), publish(two, "d"))
        seen: dict[str, list[int]] = {}
        deliveries = one.deliveries([world.topic], world.group, 16)
        for _ in range(240):
            delivery = await anext(deliveries)
            seen.setdefault(delivery.key, []).append(int(delivery.message.what))
            delivery.done()
        assert seen == {key: list(range(60)) for key in "abcd"}

    go(scenario)


def test_publish_many_keeps_its_order_within_a_key_over_several_topics(world, go):
    async def scenario():
        bus = world.open()
        other = Topic(world.topic.name + ".other", (Alert,), partitions=2)
        await bus.publish_many([(world.topic if i % 2 else other, "k", alert(i)) for i in range(40)])
        deliveries = bus.deliveries([world.topic, other], world.group, 100)
        got = await take(deliveries, 40)
        for topic, rest in ((world.topic, 1), (other, 0)):
            assert [int(d.message.what) for d in got if d.topic == topic] == [i for i in range(40) if i % 2 == rest]

    go(scenario)


def test_every_group_gets_everything_and_a_new_group_starts_at_the_beginning(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(10)])
        for group in (world.group, world.group + ".other"):
            got = await take(bus.deliveries([world.topic], group, 10), 10)
            assert sorted(texts(got)) == sorted(str(i) for i in range(10))
            for delivery in got:
                delivery.done()

    go(scenario)


def test_what_was_not_acknowledged_comes_again_after_the_consumer_is_killed(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "same", alert(i)) for i in range(20)])
        process = await asyncio.to_thread(world.member, world.group, "odd")
        for _ in range(20):
            assert await asyncio.to_thread(process.stdout.readline)
        process.send_signal(signal.SIGKILL)
        process.wait()
        got = await take(
            bus.deliveries([world.topic], world.group, 100), 20
        )  # 0 was never acknowledged: all from there on
        assert texts(got) == [str(i) for i in range(20)]

    go(scenario)


def test_what_was_acknowledged_does_not_come_again_after_a_restart(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "same", alert(i)) for i in range(10)])
        for delivery in await take(bus.deliveries([world.topic], world.group, 10), 10):
            if delivery.message.what != "7":
                delivery.done()
        await bus.close()
        again = world.open()
        deliveries = again.deliveries([world.topic], world.group, 10)
        assert texts(await take(deliveries, 1)) == ["7"]
        assert await nothing_comes(deliveries, 1.0)

    go(scenario)


def test_a_publish_that_returned_survives_sigkill_of_the_publisher(world, go):
    async def scenario():
        process = await asyncio.to_thread(world.member, "-", "publish")
        durable = -1
        for _ in range(50):
            durable = int(await asyncio.to_thread(process.stdout.readline))
        process.send_signal(signal.SIGKILL)
        durable = max([durable, *(int(line) for line in process.stdout.read().split())])
        process.wait()
        deliveries = world.open().deliveries([world.topic], world.group, 10_000)
        seen = {int(d.message.what) for d in await take(deliveries, durable + 1)}
        assert seen >= set(range(durable)) | ({durable} & seen)
        assert len(seen) == durable + 1

    go(scenario)


def test_the_lowest_contiguous_offset_is_committed_when_acknowledgements_come_out_of_order(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(6)])
        deliveries = bus.deliveries([world.topic], world.group, 10)
        got = await take(deliveries, 6)
        for i in (5, 3, 1):
            got[i].done()
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 6}
        got[0].done()
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 4}
        got[2].done()
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 2}
        (before,) = [at for at in (await bus.standing([world.topic], world.group)).values() if at.end > at.acknowledged]
        assert before.acknowledged == got[4].offset
        got[4].done()
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 0}
        after = await bus.standing([world.topic], world.group)
        assert all(at.acknowledged >= at.end for at in after.values())
        await deliveries.aclose()

    go(scenario)


def test_no_more_than_max_in_flight_are_out_at_a_time(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(10)])
        deliveries = bus.deliveries([world.topic], world.group, 3)
        got = await take(deliveries, 3)
        assert await nothing_comes(deliveries)
        got[1].done()
        await take(deliveries, 1)
        assert await nothing_comes(deliveries)

    go(scenario)


def test_retry_gives_the_message_again_later_and_lets_others_pass(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(3)])
        deliveries = bus.deliveries([world.topic], world.group, 1)
        (first,) = await take(deliveries, 1)
        loop = asyncio.get_running_loop()
        due = loop.time() + 0.5
        first.retry(0.5)
        first.done()  # the first answer counts
        for expected in ("1", "2"):
            (got,) = await take(deliveries, 1)
            assert got.message.what == expected
            got.done()
        (again,) = await take(deliveries, 1)
        assert again.message.what == "0"
        assert loop.time() >= due - 0.01
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 3}
        again.done()
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 0}

    go(scenario)


def answers(world: World, answer: str) -> float:
    """What the metrics say of this process's members of the group: alerts are made of it."""
    labels = {"topic": world.topic.name, "group": world.group, "answer": answer}
    return REGISTRY.get_sample_value("etude_bus_deliveries_total", labels) or 0.0


def test_bury_keeps_bytes_and_headers_in_the_dead_letter_topic_with_the_reason(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish(world.topic, "k", alert("bad"))
        (bad,) = await take(bus.deliveries([world.topic], world.group, 1), 1)
        bad.bury("cannot be graded")
        (letter,) = await take(bus.deliveries([dead_letters(world.topic)], world.group, 1), 1)
        raw = letter.message
        assert raw.headers["dead-letter-reason"] == "cannot be graded"
        assert raw.headers["schema"] == f"{world.topic.name}/1.0"
        assert raw.headers["dead-letter-source"].startswith(world.topic.name)
        assert (letter.key, b'"what":"bad"' in raw.data) == ("k", True)
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 0}
        assert (answers(world, "buried"), answers(world, "done")) == (1, 0)

    go(scenario)


UNREADABLE = {
    "no header": Raw(b"{}", {}),
    "another major": Raw(b"{}", {"schema": "x/9.0"}),
    "no JSON": Raw(b"\xff\x00{", {"schema": "x/1.0"}),
    "a field of another type": Raw(b'{"type":"Alert","run":1}', {"schema": "x/1.0"}),
    "a foreign message": Raw(b'{"type":"RunCommand","run":"r","action":"stop"}', {"schema": "x/1.0"}),
    "deep nesting": Raw(b'{"a":' * 5000, {"schema": "x/1.0"}),
}


def test_an_unreadable_message_is_buried_and_never_stops_the_consumer(world, go):
    async def scenario():
        bus = world.open()
        raw_topic = Topic(world.topic.name, (Raw,), partitions=world.topic.partitions)
        for poison in UNREADABLE.values():
            await bus.publish(raw_topic, "k", poison)
        await bus.publish(world.topic, "k", alert("good"))
        (good,) = await take(bus.deliveries([world.topic], world.group, 1), 1)
        assert good.message.what == "good"
        good.done()
        letters = await take(bus.deliveries([dead_letters(world.topic)], world.group, 10), len(UNREADABLE))
        assert sorted(letter.message.data for letter in letters) == sorted(p.data for p in UNREADABLE.values())
        assert all(letter.message.headers["dead-letter-reason"] for letter in letters)
        assert await bus.lag([world.topic], world.group) == {world.topic.name: 0}
        assert answers(world, "buried") == len(UNREADABLE)

    go(scenario)


def test_unknown_fields_of_the_same_major_version_are_ignored(world, go):
    async def scenario():
        bus = world.open()
        newer = b'{"type":"Alert","run":"r","name":"n","severity":"info","what":"w","new_field":[1]}'
        await bus.publish(Topic(world.topic.name, (Raw,), partitions=8), "k", Raw(newer, {"schema": "x/1.7"}))
        (got,) = await take(bus.deliveries([world.topic], world.group, 1), 1)
        assert (got.message.what, got.headers["schema"]) == ("w", "x/1.7")

    go(scenario)


def test_a_message_above_64_kib_or_of_a_foreign_type_is_refused_at_the_producer(world, go):
    async def scenario():
        bus = world.open()
        with pytest.raises(MessageTooLarge):
            await bus.publish(world.topic, "k", alert("x" * MAX_BYTES))
        with pytest.raises(TypeError, match="carries Alert, not RunCommand"):
            await bus.publish(world.topic, "k", RunCommand(run="r", action="stop"))
        with pytest.raises(MessageTooLarge):  # all or nothing: the good one is not sent either
            await bus.publish_many([(world.topic, "k", alert("good")), (world.topic, "k", alert("x" * MAX_BYTES))])
        await bus.publish(world.topic, "k", alert("x" * (MAX_BYTES - 200)))
        (got,) = await take(bus.deliveries([world.topic], world.group, 1), 1)
        assert len(got.message.what) == MAX_BYTES - 200

    go(scenario)


def test_a_broadcast_reader_reads_all_from_the_start_every_time_and_then_follows(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(5)])
        for _ in range(2):
            deliveries = bus.deliveries([world.topic], None, 2)
            for _ in range(5):
                (await anext(deliveries)).done()
        follower = bus.deliveries([world.topic], None, 10)
        await take(follower, 5)
        await world.open("other").publish(world.topic, "k", alert("new"))
        assert texts(await take(follower, 1)) == ["new"]

    go(scenario)


def test_a_broadcast_reader_knows_when_it_has_read_what_was_there_at_its_start(world, go):
    async def scenario():
        bus = world.open()
        raw = Topic(world.topic.name, (Raw,), partitions=world.topic.partitions)
        empty = Topic(world.topic.name + ".empty", (Alert,), partitions=2)
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(300)])
        await bus.publish(raw, "last", Raw(b"{}", {"schema": "x/9.0"}))  # nobody gets to see it
        deliveries = bus.deliveries([world.topic, empty], None, 4)
        knows = asyncio.create_task(deliveries.caught_up())
        for _ in range(299):
            (await anext(deliveries)).done()
        await quiet(0.5, "a pause, however long, says nothing")
        assert not knows.done()
        last = await anext(deliveries)
        await asyncio.wait_for(knows, patient(30))
        last.done()
        await bus.publish(world.topic, "k", alert("new"))
        await asyncio.wait_for(deliveries.caught_up(), patient(30))  # and goes on knowing it
        assert texts(await take(deliveries, 1)) == ["new"]

    go(scenario)


def test_of_an_empty_log_everything_was_read_at_once(world, go):
    async def scenario():
        bus = world.open()
        deliveries = bus.deliveries([world.topic], None, 4)
        await asyncio.wait_for(deliveries.caught_up(), patient(30))
        assert await nothing_comes(deliveries)

    go(scenario)


def test_who_waits_for_the_past_hears_when_it_will_never_be_read(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(9)])
        deliveries = bus.deliveries([world.topic], None, 4)
        waits = asyncio.create_task(deliveries.caught_up())
        await take(deliveries, 4)  # it answers none: no more come
        await quiet(0.3, "one that reads no further does not know")
        await bus.close()
        with pytest.raises(BusUnavailable):
            await asyncio.wait_for(waits, patient(30))
        with pytest.raises(ValueError, match="group"):
            await world.open().deliveries([world.topic], world.group, 4).caught_up()

    go(scenario)


def test_close_writes_acknowledgements_and_ends_the_iterators(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish(world.topic, "k", alert(1))
        deliveries = bus.deliveries([world.topic], world.group, 1)
        (await anext(deliveries)).done()
        waiting = asyncio.create_task(anext(deliveries, None))
        await asyncio.sleep(0)
        await bus.close()
        assert await waiting is None
        with pytest.raises(BusUnavailable):
            await bus.publish(world.topic, "k", alert(2))
        assert await world.open("later").lag([world.topic], world.group) == {world.topic.name: 0}

    go(scenario)


def test_a_cancelled_wait_loses_no_message(world, go):
    async def scenario():
        bus = world.open()
        deliveries = bus.deliveries([world.topic], world.group, 100)
        publisher = asyncio.create_task(bus.publish_many([(world.topic, "k", alert(i)) for i in range(30)]))
        got: list[Delivery] = []
        while len(got) < 30:
            try:
                async with asyncio.timeout(0.003):
                    got.append(await anext(deliveries))
            except TimeoutError:
                pass
        await publisher
        assert texts(got) == [str(i) for i in range(30)]

    go(scenario)


def test_batches_are_full_when_there_is_plenty_and_partial_after_the_linger(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(25)])
        # A busy machine pauses for less than the linger.
        stream = batches(bus.deliveries([world.topic], world.group, 64), max_size=10, linger_s=3.0)
        sizes = []
        async for batch in stream:
            sizes.append(len(batch))
            for delivery in batch:
                delivery.done()
            if sum(sizes) == 25:
                break
        assert sizes == [10, 10, 5]
        await stream.aclose()

    go(scenario)
