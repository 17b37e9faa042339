"""Speaks with the services through the bus, as any client would: starts and stops a run, asks for evaluations, listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etude.demo.progress import Progress
from shared.bus import Bus
from shared.contracts import topics as t
from shared.contracts.messages import EvalRequested, RunControl
from shared.contracts.run import Ref, RunConfig
from shared.objects import Objects

LISTENED = (
    t.RUNS_CONTROL,
    t.ROLLOUTS_REQUESTED,
    t.ROLLOUTS_FINISHED,
    t.ROLLOUTS_SCORED,
    t.GROUPS_READY,
    t.STEPS_COMMITTED,
    t.POLICIES_PUBLISHED,
    t.POLICIES_APPLIED,
    t.EVALS_FINISHED,
    t.ALERTS,
)


class Stalled(RuntimeError):
    """Nothing has happened for long; the text says what was awaited."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long silence is borne before the demo says that it stalls (it goes on waiting), and before it gives up."""

    give_up_s: float = 300.0


class Conductor:
    """One run, seen from outside. Use `async with`."""

    def __init__(self, bus: Bus, objects: Objects, run: str, patience: Patience = Patience()) -> None:
        self.bus, self.objects, self.run = bus, objects, run
        self.progress = Progress()
        self.patience = patience
        self._news = asyncio.Event()
        self._last_news = time.monotonic()
        self._listener: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Conductor:
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._listener:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener

    async def _listen(self) -> None:
        async for delivery in self.bus.deliveries(LISTENED, group=None, max_in_flight=4096):
            if delivery.message.run == self.run:
                self.progress.see(delivery.message, float(delivery.headers.get("time", time.time())))
                self._last_news = time.monotonic()
                self._news.set()
            delivery.done()

    async def _until(self, there: Callable[[], bool], what: str) -> None:
        """Waits for a fact. Raises Stalled after a long silence of the whole run."""
        self._last_news = time.monotonic()
        while not there():
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), 1.0)
            silent = time.monotonic() - self._last_news
            if silent > self.patience.give_up_s:
                raise Stalled(
                    f"no message for {silent:.0f} s while waiting for {what}; `etude status` and `etude logs` say more"
                )

    async def control(self, *actions: str, config: Ref | None = None) -> None:
        """Published together and in order, so that `start` and `pause` leave no gap between them."""
        words = [RunControl(run=self.run, action=a, config=config, by="etude demo") for a in actions]  # type: ignore[arg-type]
        await self.bus.publish_many([(t.RUNS_CONTROL, self.run, word) for word in words])

    async def served(self, serial: int) -> None:
        """Until a replica serves this version or a newer one."""
        await self._until(
            lambda: any(a.ok and a.serial >= serial for a in self.progress.serving.values()),
            f"a replica that serves version {serial}",
        )

    async def evaluate(
        self, name: str, serial: int, config: RunConfig, *, problems: int, samples: int
    ) -> dict[str, Any]:
        """The report of one evaluation (see services/evaluator). Asking twice for the same name asks once."""
        if name not in self.progress.evaluations:
            if not (config.eval_pack and config.eval_pack_hidden):
                raise ValueError("this run has no evaluation pack")
            await self.bus.publish(
                t.EVALS_REQUESTED,
                self.run,
                EvalRequested(
                    run=self.run,
                    eval=name,
                    serial=serial,
                    pack=config.eval_pack,
                    pack_hidden=config.eval_pack_hidden,
                    samples=samples,
                    problems=problems,
                    sampling=config.sampling,
                ),
            )
            await self._until(lambda: name in self.progress.evaluations, f"the evaluation of version {serial}")
        return json.loads(self.objects.get(self.progress.evaluations[name].report))

    async def finished(self) -> None:
        await self._until(lambda: self.progress.state == "finished", "the end of practice")
