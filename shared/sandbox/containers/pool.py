"""Containers that wait: one that is ready is taken at once, and another is started for the next opening.

Invariants:
- A container is given out once, and has run nothing of any task.
- After `close` none is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict

from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import machine
from shared.sandbox.containers.engine import Engine
from shared.sandbox.containers.machine import Plan
from shared.sandbox.containers.running import Running, boot

_KINDS = 32  # that have containers ready, the last used


class Pool:
    """`warm`: containers kept ready for each plan; 0: none."""

    def __init__(self, warm: int) -> None:
        self._warm = warm
        self._ready: defaultdict[Plan, list[Running]] = defaultdict(list)
        self._filling: dict[asyncio.Task[None], Plan] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def take(self, engine: Engine, plan: Plan) -> Running:
        """Return a container of this plan. Raises SandboxUnavailable, ValueError."""
        ready = self._ready.pop(plan, [])
        self._ready[plan] = ready  # the last used stands last
        found = None
        while ready and found is None:
            one = ready.pop()
            if one.channel.alive and time.monotonic() - one.born < machine.WARM_S:
                found = one
            else:
                self._leave(one)
        self._refill(engine, plan)
        return found or await boot(engine, plan)

    async def close(self) -> None:
        """Remove every container that waits, or that starts just now: a request to the engine cannot be called back."""
        await asyncio.gather(*self._filling, return_exceptions=True)
        for ready in self._ready.values():
            for one in ready:
                self._leave(one)
        self._ready.clear()
        await asyncio.gather(*self._leaving)

    def _refill(self, engine: Engine, plan: Plan) -> None:
        if not self._warm:
            return
        while len(self._ready) > _KINDS:
            for one in self._ready.pop(next(iter(self._ready))):
                self._leave(one)
        lacking = self._warm - len(self._ready[plan]) - list(self._filling.values()).count(plan)
        for _ in range(lacking):
            task = asyncio.create_task(self._fill(engine, plan))
            self._filling[task] = plan
            task.add_done_callback(self._filling.pop)

    async def _fill(self, engine: Engine, plan: Plan) -> None:
        with contextlib.suppress(SandboxUnavailable, ValueError):  # the next opening meets the same and says so
            self._ready[plan].append(await boot(engine, plan))

    def _leave(self, one: Running) -> None:
        task = asyncio.create_task(one.close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
