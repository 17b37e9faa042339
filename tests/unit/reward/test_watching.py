"""Drift is noticed across restarts and replicas, and said once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.reward.monitors import WINDOW
from services.reward.watching import Watching
from shared import bus as buses
from shared.contracts import topics
from shared.contracts.messages import Alert, AttemptKey, Effort, RolloutScored, StopReason, Verdict
from shared.contracts.run import Ref

REF = Ref(key="k", size=1, checksum="0" * 32)


def scored(number: int, solved: bool) -> RolloutScored:
    return RolloutScored(
        run="r",
        key=AttemptKey(attempt=f"a-{number}", epoch=0, group=f"g-{number}", problem="p"),
        verdict=Verdict(solved=solved, passed=int(solved), total=1),
        reward=float(solved),
        terms={"solved": float(solved)},
        reward_config="c",
        trajectory=REF,
        effort=Effort(),
        stop=StopReason.submitted,
        oldest_version=0,
        found=[],
    )


def test_a_collapse_during_a_restart_is_said_once_however_many_replicas_and_lives_there_are(tmp_path: Path) -> None:
    bus = buses.connect(f"sqlite:{tmp_path / 'bus.db'}", client="test")
    said: list[str] = []

    async def hear() -> None:
        async for delivery in bus.deliveries([topics.ALERTS], None, 16):
            delivery.done()
            assert isinstance(delivery.message, Alert)
            said.append(delivery.message.name)

    async def practise(first: int, solved: bool) -> None:
        words = [scored(n, solved and n % 2 == 0) for n in range(first, first + 2 * WINDOW)]
        await bus.publish_many([(topics.ROLLOUTS_SCORED, word.key.attempt, word) for word in words])

    async def life(seconds: float, replicas: int = 1) -> None:
        watching = [asyncio.create_task(Watching(bus).run()) for _ in range(replicas)]
        await asyncio.sleep(seconds)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    async def scenario() -> None:
        hearing = asyncio.create_task(hear())
        await practise(0, True)
        await life(1.0)
        await practise(10_000, False)  # while nobody watches
        for _ in range(20):
            await life(1.0)
            if said:
                break
        await life(2.0, replicas=2)
        hearing.cancel()
        await bus.close()

    asyncio.run(scenario())
    assert said == ["fewer_solved"]


def test_an_alarm_that_two_replicas_have_said_does_not_hide_the_next_one(tmp_path: Path) -> None:
    bus = buses.connect(f"sqlite:{tmp_path / 'bus.db'}", client="test")
    said: list[tuple[str, int]] = []

    async def hear() -> None:
        async for delivery in bus.deliveries([topics.ALERTS], None, 16):
            delivery.done()
            assert isinstance(delivery.message, Alert)
            said.append((delivery.message.name, delivery.message.occurrence))

    async def scenario() -> None:
        first = Alert(run="r", name="fewer_solved", severity="warning", what="said by two replicas")
        await bus.publish_many([(topics.ALERTS, "r", first)] * 2)
        solved = [n % 2 == 0 for n in range(2 * WINDOW)]
        unsolved = [False] * (2 * WINDOW)
        words = [scored(n, one) for n, one in enumerate(solved + unsolved + solved + unsolved)]
        await bus.publish_many([(topics.ROLLOUTS_SCORED, word.key.attempt, word) for word in words])
        tasks = [asyncio.create_task(hear()), asyncio.create_task(Watching(bus).run())]
        async with asyncio.timeout(120):
            while len(said) < 3:  # noqa: ASYNC110 `hear` runs until it is cancelled
                await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await bus.close()

    asyncio.run(scenario())
    assert said == [("fewer_solved", 1), ("fewer_solved", 1), ("fewer_solved", 2)]
