"""`Functions` over a fixed number of slots, for asyncio and for plain threads."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from shared.sandbox import CallResult, FunctionRun


class Runner(Protocol):
    """What an adapter gives: a place for one run at a time. Used by one thread at a time; a process forked from the one that
    made it has slots of its own, and leaves this one alone."""

    def run(self, run: FunctionRun) -> list[CallResult]:
        """One result per call, in order, also of a run that died or hung. What is broken is replaced and the run given once
        more; then SandboxUnavailable."""

    def close(self) -> None:
        """Ends what it holds. Repeating it does nothing."""


class FunctionPool:
    """At most `workers` runs at a time, the rest waits. Any number of tasks and threads may call; a process forked from
    this one gets slots of its own."""

    def __init__(self, make_slot: Callable[[int], Runner], workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers: found {workers}, expected at least 1")
        self.workers = workers
        self._make_slot = make_slot
        self._lock = threading.Lock()
        self._owner = 0
        self._closed = False

    async def run(self, runs: Sequence[FunctionRun]) -> list[list[CallResult]]:
        self._own()
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self._threads, self._one, run) for run in runs)))

    def run_sync(self, runs: Sequence[FunctionRun]) -> list[list[CallResult]]:
        """The same for callers without an event loop (Celery tasks, process pools)."""
        self._own()
        if self.workers == 1 or len(runs) == 1:
            return [self._one(run) for run in runs]
        return list(self._threads.map(self._one, runs))

    async def close(self) -> None:
        await asyncio.to_thread(self.close_sync)

    def close_sync(self) -> None:
        """Waits for the runs in hand, then ends every sandbox."""
        if self._owner == os.getpid() and not self._closed:
            self._closed = True
            self._threads.shutdown(wait=True)
            for _ in range(self.workers):
                self._idle.get().close()

    def _own(self) -> None:
        with self._lock:
            if self._owner == os.getpid():
                return
            self._owner, self._closed = os.getpid(), False
            self._threads = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
            self._idle: queue.LifoQueue[Runner] = queue.LifoQueue()  # the last used is the warmest
            for number in reversed(range(self.workers)):
                self._idle.put(self._make_slot(number))

    def _one(self, run: FunctionRun) -> list[CallResult]:
        slot = self._idle.get()
        try:
            return slot.run(run)
        finally:
            self._idle.put(slot)
