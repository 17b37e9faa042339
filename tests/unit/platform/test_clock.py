"""The clock of tests (tests/clock.py): it moves when nothing else does."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from tests import clock


def test_hours_pass_at_once_and_in_the_order_of_the_timers() -> None:
    async def later(seconds: float, name: str) -> str:
        await clock.passes(seconds)
        order.append((name, asyncio.get_running_loop().time()))
        return name

    async def story() -> list[str]:
        return await asyncio.gather(later(7200, "slow"), later(60, "quick"))

    order: list[tuple[str, float]] = []
    assert clock.run(story()) == ["slow", "quick"]
    assert order == [("quick", 1060.0), ("slow", 8200.0)]


def test_it_stands_still_while_a_thread_works() -> None:
    async def story() -> None:
        go = threading.Event()
        working = asyncio.create_task(asyncio.to_thread(go.wait))
        await asyncio.sleep(0)  # it has begun
        threading.Timer(0.05, go.set).start()
        await clock.passes(5)  # no sooner than the thread has ended
        assert working.done()

    clock.run(story())


def test_a_module_that_is_named_reads_it_and_gets_its_own_back() -> None:
    async def story() -> float:
        await clock.passes(100)
        return sys.modules[__name__].time.monotonic()

    assert clock.run(story(), sys.modules[__name__]) == pytest.approx(1100.0)
    assert time.monotonic.__module__ == "time"


def test_nobody_waits_in_earnest_by_mistake() -> None:
    with pytest.raises(AssertionError, match="in earnest"):
        asyncio.run(clock.passes(3600))
