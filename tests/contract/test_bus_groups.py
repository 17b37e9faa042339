"""What every bus promises of consumer groups: who gets what when members join, leave, die, freeze and come back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections import Counter

import pytest

from shared.bus import connect, dead_letters, kafka_clients, kafka_reader
from tests.contract.bus_world import alert, drained, freeze, go, nothing_comes, take, texts, world
from tests.patience import quiet

__all__ = ["go", "world"]


def test_three_consumers_share_the_partitions_and_every_message_goes_to_one(world, go):
    """Once the group has balanced. While members join, a message that is in hand may come to the next owner too, and so may one
    whose owner is taken for dead on a machine that is busy with other work: such a round does not count."""

    async def scenario():
        buses = [world.open(f"c{i}") for i in range(3)]
        seen: Counter[str] = Counter()
        members: set[int] = set()

        async def consume(index):
            async for delivery in buses[index].deliveries([world.topic], world.group, 4):
                seen[delivery.message.what] += 1
                members.add(index)
                delivery.done()

        tasks = [asyncio.create_task(consume(i)) for i in range(3)]
        for sent in itertools.count(0, 48):  # until such a round: `go` has a limit
            seen.clear()
            members.clear()
            texts_of_round = [str(i) for i in range(sent, sent + 48)]
            await buses[0].publish_many([(world.topic, text, alert(text)) for text in texts_of_round])
            await drained(buses[0], world.topic, world.group)
            assert set(texts_of_round) <= set(seen)
            if len(members) == 3 and all(seen[text] == 1 for text in texts_of_round):
                break
        for task in tasks:
            task.cancel()

    go(scenario)


def test_a_dead_members_partitions_move_to_the_living(world, go):
    async def scenario():
        bus = world.open()
        processes = [await asyncio.to_thread(world.member, world.group, "hold") for _ in range(2)]
        deliveries = bus.deliveries([world.topic], world.group, 1000)
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(64)])
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        seen: set[str] = set()
        while len(seen) < 64:
            delivery = await anext(deliveries)
            seen.add(delivery.message.what)
            delivery.done()

    go(scenario)


def test_a_frozen_members_late_acknowledgement_does_not_move_the_new_owners_position(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(16)])
        process = await asyncio.to_thread(world.member, world.group, "late")
        theirs = {(await asyncio.to_thread(process.stdout.readline)).strip() for _ in range(16)}
        assert theirs == {str(i) for i in range(16)}  # it holds all of them
        await freeze(process, bus, [(world.topic, "new", alert("new"))])
        deliveries = bus.deliveries([world.topic], world.group, 1000)
        held = await take(deliveries, 17)  # it was taken for dead
        assert set(texts(held)) == theirs | {"new"}
        process.send_signal(signal.SIGUSR1)  # pending: the first that it does
        process.send_signal(signal.SIGCONT)
        line = ""
        while line != "acknowledged\n":
            line = await asyncio.to_thread(process.stdout.readline)
        for _ in range(8):
            await quiet(0.5, "the late acknowledgement moves no position")
            assert await bus.lag([world.topic], world.group) == {world.topic.name: 17}
        process.kill()
        process.wait()
        for delivery in held:
            delivery.done()
        await drained(bus, world.topic, world.group, deliveries)

    go(scenario)


def test_a_consumer_that_leaves_hands_back_what_it_did_not_take(world, go):
    async def scenario():
        bus = world.open()
        await bus.publish_many([(world.topic, "k", alert(i)) for i in range(10)])
        leaver = bus.deliveries([world.topic], world.group, 5)
        got = await take(leaver, 5)
        del leaver  # as after a `break`
        for delivery in got:
            delivery.done()
        assert texts(await take(bus.deliveries([world.topic], world.group, 5), 5)) == [str(i) for i in range(5, 10)]

    go(scenario)


def test_work_that_ends_soon_is_not_given_twice_when_a_member_joins(world, go, monkeypatch):
    monkeypatch.setattr(kafka_clients, "SESSION_MS", 60_000)

    async def scenario():
        one, two = world.steadfast("one"), world.steadfast("two")
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
            await asyncio.sleep(0.1)
        await drained(one, world.topic, world.group)
        assert seen == Counter({str(i): 1 for i in range(sent)})
        for task in tasks:
            task.cancel()

    go(scenario)


def test_a_member_whose_hands_are_full_lets_another_join(world, go):
    async def scenario():
        one, two = world.open("one"), world.open("two")
        await one.publish_many([(world.topic, str(i), alert(i)) for i in range(200)])
        first = one.deliveries([world.topic], world.group, 1)
        held = await take(first, 1)
        await quiet(1.0, "the first reads ahead as far as it may, and answers nothing")
        await take(two.deliveries([world.topic], world.group, 1), 1)
        held[0].done()

    go(scenario)


def test_a_join_whose_answer_comes_between_two_polls_is_seen_to_its_end(world, go, monkeypatch):
    """As on a starved machine, where no poll is long enough."""
    for name in ("POLL_MS", "IDLE_POLL_MS"):
        monkeypatch.setattr(kafka_reader, name, 1)

    async def scenario():
        buses = {name: world.open(name) for name in ("one", "two")}
        seen: dict[str, set[str]] = {name: set() for name in buses}

        async def work(name):
            async for delivery in buses[name].deliveries([world.topic], world.group, 4):
                seen[name].add(delivery.message.what)
                delivery.done()

        tasks = [asyncio.create_task(work(name)) for name in buses]
        sent = 0
        while not all(seen.values()):  # both have joined
            await buses["one"].publish_many([(world.topic, str(i), alert(i)) for i in range(sent, sent + 16)])
            sent += 16
            await asyncio.sleep(0.1)
        await drained(buses["one"], world.topic, world.group)
        assert set.union(*seen.values()) == {str(i) for i in range(sent)}
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


def test_what_is_buried_while_its_partition_moves_becomes_one_letter(world, go):
    async def scenario():
        one, two = world.open("one"), world.open("two")
        await one.publish_many([(world.topic, str(i), alert(i)) for i in range(32)])
        first = one.deliveries([world.topic], world.group, 100)
        held = await take(first, 32)
        second = two.deliveries([world.topic], world.group, 100)
        await quiet(4.0, "the first hears of the other with a heartbeat; what moves waits for what is in flight")
        for delivery in held:
            delivery.bury("by the first")

        async def bury():
            async for delivery in second:
                delivery.bury("by the second")

        burying = asyncio.create_task(bury())
        await drained(one, world.topic, world.group)
        burying.cancel()
        assert await two.lag([dead_letters(world.topic)], "anybody") == {world.topic.dead_letter: 32}

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
        await drained(second, world.topic, world.group, deliveries)

    go(scenario)


def test_behind_what_an_earlier_owner_finished_the_log_is_empty(world, go):
    async def scenario():
        first, second = world.open("first"), world.open("second")
        await first.publish_many([(world.topic, "one key", alert(i)) for i in range(600)])
        held = await take(first.deliveries([world.topic], world.group, 1000), 600)
        for delivery in held[1:]:
            delivery.done()
        await first.lag([world.topic], world.group)
        await first.close()
        deliveries = second.deliveries([world.topic], world.group, 1)
        (again,) = await take(deliveries, 1)
        assert again.message.what == "0"
        again.done()
        assert await nothing_comes(deliveries, 1.0)
        await drained(second, world.topic, world.group)

    go(scenario)


def test_a_long_handler_keeps_its_place_in_the_group(world, go, monkeypatch):
    """Ten minutes against a limit of five are sixteen seconds against one of twelve."""
    monkeypatch.setattr(kafka_clients, "SESSION_MS", 12_000)
    monkeypatch.setattr(kafka_clients, "HEARTBEAT_MS", 2_000)
    monkeypatch.setattr(kafka_clients, "LONGEST_POLL_MS", 12_000)

    async def scenario():
        bus = world.impatient()
        await bus.publish_many([(world.topic, str(i), alert(i)) for i in range(4)])
        deliveries = bus.deliveries([world.topic], world.group, 4)
        held = await take(deliveries, 4)
        await bus.publish(world.topic, "later", alert("later"))
        await quiet(3.0 if world.embedded else 16.0, "a handler that outlasts the limits is not taken for dead")
        for delivery in held:
            delivery.done()  # would move nothing, had it lost its place
        (later,) = await take(deliveries, 1)
        later.done()
        assert later.message.what == "later"  # nor do the four come again
        await drained(bus, world.topic, world.group, deliveries)

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


def test_partitions_of_a_replica_with_a_name_of_its_own_wait_for_its_return(world, go):
    if world.embedded:
        pytest.skip("processes of one machine come back sooner than their partitions could move")

    async def scenario():
        def replica(name):
            bus = connect(f"{world.url}?instance={name}", client=name)
            world.opened.append(bus)
            return bus

        async def share_of(deliveries, seconds, least=frozenset()):
            """The keys that come: `least`, however long that takes, and what else comes within `seconds`."""
            found = set()
            while not found >= least:
                delivery = await anext(deliveries)
                delivery.done()
                found.add(delivery.key)
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
        assert await share_of(one, 3.0, first) == first
        back = replica("leaves").deliveries([world.topic], world.group, 100)
        assert await share_of(back, 1.0, second) == second

    go(scenario)
