"""Work that runs at the same time ends together."""

from __future__ import annotations

import asyncio

import pytest

from shared.together import together


async def after(delay_s: float, result: int) -> int:
    await asyncio.sleep(delay_s)
    return result


def test_results_come_in_order() -> None:
    assert asyncio.run(together([after(0.02, 1), after(0.0, 2), after(0.01, 3)])) == [1, 2, 3]
    assert asyncio.run(together([])) == []


def test_one_error_ends_the_others_and_is_raised_alone() -> None:
    ended: list[str] = []

    async def slow() -> int:
        try:
            return await after(600.0, 1)
        finally:
            await asyncio.sleep(0)
            ended.append("slow")

    async def fails() -> int:
        await asyncio.sleep(0.01)
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        asyncio.run(together([slow(), fails(), slow()]))
    assert ended == ["slow", "slow"]


def test_the_wait_can_be_cancelled() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(0.01):
            await together([after(600.0, 1)])

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
