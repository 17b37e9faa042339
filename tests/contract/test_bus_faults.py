"""What every bus promises when something is wrong: rebalances with work in hand, poison, storms, clocks, a log that is away."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter

import pytest

from shared.bus import BusUnavailable, connect, dead_letters, kafka_reader
from shared.contracts.codec import Raw
from shared.contracts.messages import AttemptCancel
from shared.contracts.topics import Topic
from shared.contracts.tracing import TRACE_HEADER, trace_id
from tests.contract.bus_world import alert, go, nothing_comes, take, texts, world

__all__ = ["go", "world"]


async def drained(bus, topic, group, deliveries=None) -> None:
    """With `deliveries`, what comes again (its answer was lost with a connection) is answered meanwhile."""

    async def answer() -> None:
        async for delivery in deliveries:
            delivery.done()

    answering = asyncio.create_task(answer()) if deliveries else None
    while await bus.lag([topic], group) != {topic.name: 0}:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    if answering:
        answering.cancel()


def test_work_that_ends_soon_is_not_given_twice_when_a_member_joins(world, go):
    async def scenario():
        one, two = world.open("one"), world.open("two")
        await one.publish_many([(world.topic, str(i), alert(i)) for i in range(64)])
        seen: Counter[str] = Counter()
        by_member: Counter[str] = Counter()

        async def work(bus, name):
            async for delivery in bus.deliveries([world.topic], world.group, 4):
                await asyncio.sleep(0.05)
                seen[delivery.message.what] += 1
                by_member[name] += 1
                delivery.done()

        tasks = [asyncio.create_task(work(one, "one"))]
        while sum(seen.values()) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        tasks.append(asyncio.create_task(work(two, "two")))
        sent = 64
        while not by_member["two"]:  # it has joined
            await one.publish_many([(world.topic, str(i), alert(i)) for i in range(sent, sent + 16)])
            sent += 16
            await asyncio.sleep(0.3)
        await drained(one, world.topic, world.group)
        assert seen == Counter({str(i): 1 for i in range(sent)})
        for task in tasks:
            task.cancel()

    go(scenario)


def test_work_that_outlasts_a_rebalance_goes_to_the_new_owner_and_its_late_answer_moves_nothing(world, go):
    async def scenario():
        one, two = world.open("one"), world.open("two")
        await one.publish_many([(world.topic, str(i), alert(i)) for i in range(32)])
        first = one.deliveries([world.topic], world.group, 100)
        held = await take(first, 32)
        second = two.deliveries([world.topic], world.group, 100)
        moved = await take(second, 1)  # some partition has changed hands, with what was in flight
        before = (await two.lag([world.topic], world.group))[world.topic.name]
        for delivery in held:
            if delivery.message.what == moved[0].message.what:
                delivery.done()  # the old owner's
        assert (await two.lag([world.topic], world.group))[world.topic.name] == before

    go(scenario)


def test_what_was_finished_out_of_order_comes_to_no_next_owner(world, go):
    async def scenario():
        first, second = world.open("first"), world.open("second")
        await first.publish_many([(world.topic, "one key", alert(i)) for i in range(40)])
        held = await take(first.deliveries([world.topic], world.group, 100), 40)
        for i, delivery in enumerate(held):
            if i not in (3, 20):
                delivery.done()
        assert (await first.lag([world.topic], world.group))[
            world.topic.name
        ] == 37  # and all that was answered is known
        await first.close()
        deliveries = second.deliveries([world.topic], world.group, 100)
        again = await take(deliveries, 2)
        assert texts(again) == ["3", "20"]
        assert await nothing_comes(deliveries, 2.0)
        for delivery in again:
            delivery.done()
        await drained(second, world.topic, world.group)

    go(scenario)


def test_a_long_handler_keeps_its_place_in_the_group(world, go, monkeypatch):
    """Ten minutes against a limit of five are eight seconds against one of six."""
    monkeypatch.setattr(kafka_reader, "SESSION_MS", 6_000)
    monkeypatch.setattr(kafka_reader, "HEARTBEAT_MS", 1_000)
    monkeypatch.setattr(kafka_reader, "LONGEST_POLL_MS", 6_000)

    async def scenario():
        bus = world.impatient()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(4)])
        deliveries = bus.deliveries([world.topic], world.group, 4)
        held = await take(deliveries, 4)
        await bus.publish(world.topic, "later", alert("later"))
        await asyncio.sleep(3.0 if world.embedded else 8.0)
        for delivery in held:
            delivery.done()  # would move nothing, had it lost its place
        (later,) = await take(deliveries, 1)
        later.done()
        assert later.message.what == "later"  # nor do the four come again
        await drained(bus, world.topic, world.group)

    go(scenario)


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
        assert set(tries.values()) == {4}
        await drained(bus, world.topic, world.group)

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
        await drained(bus, world.topic, world.group)

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
        await drained(bus, world.topic, world.group)

    go(scenario)


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
                        await asyncio.sleep(0.3)

        publishing = asyncio.create_task(publish())
        async with world.away():
            await asyncio.sleep(2.0)
        seen = set(texts(got))
        while len(seen) < 40:
            delivery = await anext(deliveries)
            seen.add(delivery.message.what)
            delivery.done()
        await publishing
        await drained(bus, world.topic, world.group, deliveries)

    go(scenario)


def test_partitions_of_a_replica_with_a_name_of_its_own_wait_for_its_return(world, go):
    if world.embedded:
        pytest.skip("processes of one machine come back sooner than their partitions could move")

    async def scenario():
        def replica(name):
            bus = connect(f"{world.url}?instance={name}", client=name)
            world.opened.append(bus)
            return bus

        async def share_of(deliveries, seconds):
            found = set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    async for delivery in deliveries:
                        delivery.done()
                        found.add(delivery.key)
            return found

        keys = {str(i) for i in range(64)}
        stays, leaves = replica("stays"), replica("leaves")
        one, two = (bus.deliveries([world.topic], world.group, 100) for bus in (stays, leaves))
        first, second = set(), set()
        while not (first and second and first.isdisjoint(second) and first | second == keys):  # it has balanced
            await stays.publish_many([(world.topic, key, alert(key)) for key in sorted(keys)])
            first, second = await asyncio.gather(share_of(one, 3.0), share_of(two, 3.0))
        await leaves.close()
        await stays.publish_many([(world.topic, key, alert(key)) for key in sorted(keys)])
        assert await share_of(one, 3.0) == first
        back = replica("leaves").deliveries([world.topic], world.group, 100)
        assert await share_of(back, 6.0) == second

    go(scenario)


def test_a_member_that_is_killed_again_and_again_loses_nothing(world, go):
    async def scenario():
        bus = world.open()
        total = 200
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(total)])
        seen: Counter[str] = Counter()
        for round_ in range(3):
            process = await asyncio.to_thread(world.member, world.group, "odd")
            for _ in range(40 + round_):
                seen[(await asyncio.to_thread(process.stdout.readline)).strip()] += 1
            process.send_signal(signal.SIGKILL)
            process.wait()
        ours: set[str] = set()

        async def rest():
            async for delivery in bus.deliveries([world.topic], world.group, 100):
                ours.add(delivery.message.what)
                delivery.done()

        task = asyncio.create_task(rest())
        await drained(bus, world.topic, world.group)
        task.cancel()
        assert ours >= {str(i) for i in range(0, total, 2)}  # what no member ever acknowledged all comes to us
        assert set(seen) <= {str(i) for i in range(total)}

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
