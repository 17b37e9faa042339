"""A clock for tests of what waits: it stands still while there is work to do, and jumps to the next timer when there is none.

    clock.run(story(), graders)

runs the coroutine, in which hours take no time and a machine that is busy changes nothing. The module `graders` reads the same
clock as `time.monotonic()`. Threads of `asyncio.to_thread` are waited for, others are not, nor are sockets and processes: a
test that needs those waits for an event (tests/patience.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


def run(story: Coroutine[Any, Any, T], *modules: ModuleType) -> T:
    """Return what the coroutine returns. `modules` import `time`, and read its monotonic clock."""
    loop = Loop()
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, "time", loop))
        return stack.enter_context(asyncio.Runner(loop_factory=lambda: loop)).run(story)


async def passes(seconds: float) -> None:
    """Let the clock of `run` go on by so much."""
    assert isinstance(asyncio.get_running_loop(), Loop), "this would wait in earnest"
    await asyncio.sleep(seconds)


class _Jumping(selectors.DefaultSelector):
    """Waits for the loop, where there is something to wait for; else moves its clock."""

    loop: Loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self.loop.threads:
            return super().select()  # a thread that ends wakes it
        if not (ready := super().select(0)):
            self.loop.now += timeout
        return ready


class Loop(asyncio.SelectorEventLoop):
    """`now`: in seconds. `threads`: calls of `to_thread` that have not ended."""

    def __init__(self) -> None:
        self.now, self.threads = 1000.0, 0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        """Stand in for the module `time`. No two readings are equal, as of a real clock."""
        self.now += 1e-6
        return self.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.threads += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self.threads -= 1
