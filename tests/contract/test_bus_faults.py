"""What every bus promises when something is wrong: rebalances with work in hand, poison, storms, clocks, a log that is away."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from statistics import median

import pytest

from shared.bus import dead_letters, kafka_reader
from shared.contracts.codec import Raw
from shared.contracts.messages import AttemptCancel
from shared.contracts.topics import Topic
from shared.contracts.tracing import TRACE_HEADER, trace_id
from tests.contract.bus_world import alert, drained, go, nothing_comes, take, texts, world

__all__ = ["go", "world"]


def test_poison_between_good_messages_changes_neither_their_order_nor_their_number(world, go):
    async def scenario():
        bus = world.open()
        raw = Topic(world.topic.name, (Raw,), partitions=world.topic.partitions)
        for i in range(30):
            await bus.publish(world.topic, "k", alert(i))
            if i % 3 == 0:
                await bus.publish(raw, "k", Raw(b"\x80" * i, {"schema": f"x/1.{i}"}))
        got = await take(bus.deliveries([world.topic], world.group, 100), 30)
        assert texts(got) == [str(i) for i in range(30)]
        for delivery in got:
            delivery.done()
        await drained(bus, world.topic, world.group)
        letters = await take(bus.deliveries([dead_letters(world.topic)], world.group, 100), 10)
        assert [len(letter.message.data) for letter in letters] == list(range(0, 30, 3))

    go(scenario)


class Name(str):
    """Of a header, as other programs may write it: not UTF-8."""

    def encode(self, *_: object) -> bytes:
        return b"na\xff\xc3me"


HEADERS = {"a header without a value": None, Name("odd"): b"", "name": b"\xff", "schema": b"x/9"}


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ("k", HEADERS),
        ("k", {"schema": b"s" * 1_500_000}),
        ("k", {f"h{i}": b"x" * 50 for i in range(30_000)}),
        ("k" * 1_500_000, HEADERS),
    ],
    ids=["null", "a huge header", "many headers", "a huge key"],
)
def test_what_another_program_wrote_is_buried_and_never_stops_the_consumer(world, go, key, headers):
    async def scenario():
        bus = world.open()
        await world.foreign(bus, key, b"bytes", headers)
        await bus.publish(world.topic, key[:2], alert("good"))
        (good,) = await take(bus.deliveries([world.topic], world.group, 1), 1)
        good.done()
        assert good.message.what == "good"
        (letter,) = await take(bus.deliveries([dead_letters(world.topic)], world.group, 10), 1)
        assert (letter.message.data, letter.key[:2]) == (b"bytes", key[:2])
        await drained(bus, world.topic, world.group)

    go(scenario)


def test_readers_of_everything_write_no_dead_letters_however_often_they_start(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish(Topic(world.topic.name, (Raw,), world.topic.partitions), "k", Raw(b"{}", {"schema": "x/9.0"}))
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(2)])
        for _ in range(3):
            bus = world.open()
            odd, good = await take(bus.deliveries([world.topic], None, 2), 2)
            odd.bury("odd")
            good.done()
            assert texts([odd, good]) == ["0", "1"]
            await bus.close()  # what was settled is written
        assert await world.open().lag([dead_letters(world.topic)], "anybody") == {world.topic.dead_letter: 0}

    go(scenario)


def test_a_dead_letter_that_is_put_back_arrives_as_it_was(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish(world.topic, "key", alert("again"))
        deliveries = bus.deliveries([world.topic], world.group, 1)
        (first,) = await take(deliveries, 1)
        trace = first.headers[TRACE_HEADER]
        first.bury("not now")
        (letter,) = await take(bus.deliveries([dead_letters(world.topic)], world.group, 1), 1)
        await bus.publish(Topic(world.topic.name, (Raw,), partitions=8), letter.key, letter.message)
        (again,) = await take(deliveries, 1)
        assert (again.key, again.message, again.headers[TRACE_HEADER]) == ("key", alert("again"), trace)
        assert again.data == letter.message.data

    go(scenario)


def test_all_messages_about_an_attempt_carry_its_trace(world, go):
    async def scenario():
        bus = world.open()
        topic = Topic(world.topic.name + ".cancel", (AttemptCancel,), partitions=1)
        for attempt in ("a-1", "a-1", "a-2"):
            await bus.publish(topic, attempt, AttemptCancel(run="r", attempt=attempt))
        got = await take(bus.deliveries([topic], world.group, 3), 3)
        ids = [delivery.headers[TRACE_HEADER].split("-") for delivery in got]
        assert [one[1] for one in ids] == [trace_id("a-1"), trace_id("a-1"), trace_id("a-2")]
        assert len({one[2] for one in ids}) == 3  # each message is a span of its own

    go(scenario)


def test_the_same_message_published_twice_arrives_twice_and_in_order(world, go):
    async def scenario():
        bus = world.open()
        for what in ("a", "b", "a", "b"):
            await bus.publish(world.topic, "k", alert(what))
        assert texts(await take(bus.deliveries([world.topic], world.group, 9), 4)) == ["a", "b", "a", "b"]

    go(scenario)


def test_nothing_to_publish_is_published_at_once(world, go):
    async def scenario():
        await world.open().publish_many([])

    go(scenario)


@pytest.mark.parametrize("key", ["", " ", "ключ", "a" * 500, "\x00\n", "p/1:7"])
def test_any_text_is_a_key(world, go, key):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, key, alert(1)), (world.topic, key, alert(2))])
        got = await take(bus.deliveries([world.topic], world.group, 2), 2)
        assert [(d.key, d.message.what) for d in got] == [(key, "1"), (key, "2")]

    go(scenario)


def test_one_at_a_time_is_strictly_in_order(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(30)])
        deliveries = bus.deliveries([world.topic], world.group, 1)
        seen = []
        for _ in range(30):
            delivery = await anext(deliveries)
            seen.append(int(delivery.message.what))
            delivery.done()
        assert seen == list(range(30))

    go(scenario)


def test_a_storm_of_retries_ends_with_everything_done_once(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(60)])
        tries: Counter[str] = Counter()
        done: Counter[str] = Counter()
        deliveries = bus.deliveries([world.topic], world.group, 8)
        while sum(done.values()) < 60:
            delivery = await anext(deliveries)
            tries[delivery.message.what] += 1
            if tries[delivery.message.what] < 4:
                delivery.retry(0.02)
            else:
                done[delivery.message.what] += 1
                delivery.done()
        # More only where a member was taken for dead, as the embedded bus takes nobody here.
        assert set(tries.values()) == {4} if world.embedded else median(tries.values()) == 4
        await drained(bus, world.topic, world.group, deliveries)

    go(scenario)


@pytest.mark.parametrize("answers", ["done done", "bury done", "done bury", "retry bury", "bury bury"])
def test_only_the_first_answer_counts(world, go, answers):
    async def scenario():
        bus = world.open()
        await bus.publish(world.topic, "k", alert(1))
        deliveries = bus.deliveries([world.topic], world.group, 1)
        (got,) = await take(deliveries, 1)
        for answer in answers.split():
            {"done": got.done, "bury": lambda: got.bury("no"), "retry": lambda: got.retry(0.1)}[answer]()
        letters = bus.deliveries([dead_letters(world.topic)], world.group, 5)
        if answers.startswith("bury"):
            await take(letters, 1)
        if answers.startswith("retry"):
            (await take(deliveries, 1))[0].done()
        assert await nothing_comes(letters)
        await drained(bus, world.topic, world.group, deliveries)

    go(scenario)


def test_a_group_that_stands_still_does_not_hold_up_another(world, go):
    async def scenario():
        bus = world.open()
        still = bus.deliveries([world.topic], world.group + ".still", 1)
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(40)])
        await take(still, 1)
        assert len(await take(bus.deliveries([world.topic], world.group, 40), 40)) == 40
        assert (await bus.lag([world.topic], world.group + ".still"))[world.topic.name] == 40

    go(scenario)


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_loses_and_holds_up_nothing(world, go, monkeypatch, jump_s):
    clock, jumped = time.time, []
    monkeypatch.setattr(time, "time", lambda: clock() + sum(jumped))

    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(20)])
        deliveries = bus.deliveries([world.topic], world.group, 5)
        got = await take(deliveries, 5)
        got[0].retry(0.2)
        jumped.append(jump_s)
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(20, 40)])
        for delivery in got[1:]:
            delivery.done()
        seen = {delivery.message.what for delivery in got[1:]}
        while len(seen) < 40:
            delivery = await anext(deliveries)
            seen.add(delivery.message.what)
            delivery.done()
        await drained(bus, world.topic, world.group, deliveries)

    go(scenario)


def test_a_reader_that_had_nothing_to_do_hands_out_what_comes_at_once(world, go, monkeypatch):
    """One that waited for its poll, or its fetch, to end would need ten times as long."""
    monkeypatch.setattr(kafka_reader, "IDLE_AFTER_S", 0.0)
    monkeypatch.setattr(kafka_reader, "IDLE_POLL_MS", 20_000)
    monkeypatch.setattr(kafka_reader, "IDLE_FETCH_MS", 20_000)

    async def scenario():
        bus = world.open()
        deliveries = bus.deliveries([world.topic], world.group, 4)
        async with asyncio.timeout(60.0):
            for i in range(10):
                await bus.publish(world.topic, str(i), alert(i))
                (delivery,) = await take(deliveries, 1)
                assert delivery.message.what == str(i)
                delivery.done()

    go(scenario)


def test_a_reader_of_everything_that_came_late_sees_what_was_buried_and_done_too(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(6)])
        for i, delivery in enumerate(await take(bus.deliveries([world.topic], world.group, 6), 6)):
            delivery.done() if i % 2 else delivery.bury("odd")
        await drained(bus, world.topic, world.group)
        everything = bus.deliveries([world.topic], None, 10)
        assert sorted(texts(await take(everything, 6))) == [str(i) for i in range(6)]

    go(scenario)


def test_many_who_publish_at_once_are_all_durable(world, go):
    async def scenario():
        buses = [world.open(f"p{i}") for i in range(4)]
        await asyncio.gather(
            *(
                bus.publish(world.topic, f"{n}.{i}", alert(f"{n}.{i}"))
                for n, bus in enumerate(buses)
                for i in range(100)
            )
        )
        deliveries = buses[0].deliveries([world.topic], world.group, 1000)
        assert len(set(texts(await take(deliveries, 400)))) == 400

    go(scenario)
