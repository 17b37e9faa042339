"""Groups in hand: in order, no more at a time than are needed, and none that is waited for in vain."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.trainer.groups import LoadedGroup, Untrainable
from services.trainer.hand import Hand
from shared.contracts.messages import GroupReady


def ready(number: int) -> GroupReady:
    return GroupReady(run="r", group=f"g-{number}", problem=f"p-{number}", sequence=number, members=[])


def loaded(one: GroupReady) -> LoadedGroup:
    return LoadedGroup(one, (), frozenset())


async def aside(one: GroupReady, reason: str) -> None: ...


async def settled(hand: Hand) -> None:
    while hand._tasks:
        await asyncio.gather(*hand._tasks.values(), return_exceptions=True)


def names(batch: list[LoadedGroup] | None) -> list[str]:
    return [one.ready.group for one in batch or []]


def test_a_group_that_trains_now_is_known_until_its_step_has_ended() -> None:
    async def scenario() -> None:
        hand = Hand(lambda one: loaded(one), aside, fetches=1, ahead=4)
        for number in range(3):
            hand.add(ready(number))
        await settled(hand)
        assert names(hand.take(2)) == ["g-0", "g-1"]
        assert [f"g-{number}" in hand for number in range(4)] == [True, True, True, False]
        assert hand.take(2) is None  # asked after that step: whether it trained g-0 is the trainer's to know
        assert [f"g-{number}" in hand for number in range(3)] == [False, False, True]

    asyncio.run(scenario())


def test_no_more_groups_are_fetched_than_the_next_steps_need_and_all_are_known() -> None:
    fetched: list[str] = []

    def load(one: GroupReady) -> LoadedGroup:
        fetched.append(one.group)
        return loaded(one)

    async def scenario() -> None:
        hand = Hand(load, aside, fetches=1, ahead=4)
        for number in range(9):
            hand.add(ready(number))
        await settled(hand)
        assert fetched == ["g-0", "g-1", "g-2", "g-3"]
        assert (len(hand), all(f"g-{number}" in hand for number in range(9))) == (4, True)
        assert names(hand.take(2)) == ["g-0", "g-1"]
        await settled(hand)
        assert fetched == [f"g-{number}" for number in range(6)]
        taken = []
        while batch := hand.take(2):
            taken += names(batch)
            await settled(hand)
        assert taken == [f"g-{number}" for number in range(2, 8)]
        assert "g-8" in hand

    asyncio.run(scenario())


def test_a_group_that_cannot_be_trained_makes_room_for_the_next_even_if_nobody_could_be_told() -> None:
    told: list[str] = []

    def load(one: GroupReady) -> LoadedGroup:
        if one.group == "g-0":
            raise Untrainable("no attempt sampled a token")
        if one.group == "g-1":
            raise KeyError("a bug")
        return loaded(one)

    async def refuse(one: GroupReady, reason: str) -> None:
        told.append(reason)
        raise RuntimeError("the bus is closed")

    async def scenario() -> None:
        hand = Hand(load, refuse, fetches=2, ahead=2)
        for number in range(4):
            hand.add(ready(number))
        await settled(hand)
        assert sorted(told) == ["KeyError: 'a bug'", "no attempt sampled a token"]
        assert "g-0" not in hand
        assert names(hand.take(2)) == ["g-2", "g-3"]

    asyncio.run(scenario())


def test_a_closed_hand_fetches_nothing_more() -> None:
    async def scenario() -> None:
        fetched, go = [], threading.Event()
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def load(one: GroupReady) -> LoadedGroup:
            fetched.append(one.group)
            loop.call_soon_threadsafe(begun.set)
            go.wait(10)
            return loaded(one)

        hand = Hand(load, aside, fetches=1, ahead=1)
        for number in range(3):
            hand.add(ready(number))
        await begun.wait()
        hand.close()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await next(iter(hand._tasks.values()))
        await settled(hand)
        assert fetched == ["g-0"]

    asyncio.run(scenario())
