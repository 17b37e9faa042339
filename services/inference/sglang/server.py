"""SGLang, kept running: started, waited for, checked, watched, started again. Or, attached to a URL, waited for and watched.

Invariants:
- `up` is set only while the server answers and `check` has passed since it was started.
- A server that ends or falls silent is started again after a delay that doubles from 1 s to 60 s and returns to 1 s after
  ten minutes of health; it is never given up. Health says at any time what is waited for, and why. `failing` is set once it has
  not come up several times in a row: who waits for it may then leave.
- Whoever stops this stops the child: SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

from services.inference.sglang import metrics
from services.inference.sglang.child import Child
from services.inference.sglang.client import Client, ServerLost, ServerRefused
from shared.telemetry import Health

FIRST_DELAY_S, LAST_DELAY_S, HEALTHY_AFTER_S = 1.0, 60.0, 600.0
PROBE_EVERY_S, PROBE_S = 5.0, 30.0  # SGLang itself takes up to 20 s to find that it is not healthy
SILENT_S = 180.0  # a server that says nothing for so long is ended; its own watchdog ends it after 300 s of one step
ASK_EVERY_S = 1.0  # while it starts
STARTS_TOLERATED = 3  # in a row, that fail
GRACE_S = 30.0  # SGLang looks every five seconds whether it has drained

log = structlog.get_logger()


class NotStarted(RuntimeError):
    """The server did not come up; the text says why."""


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next start. Pure: the caller says how long the last one lived."""

    delay: float

    def after(self, lived_s: float) -> float:
        if lived_s >= HEALTHY_AFTER_S:
            self.delay = FIRST_DELAY_S
        now, self.delay = self.delay, min(LAST_DELAY_S, self.delay * 2)
        return now


class Server:
    """`start` begins a child and sets the client's URL; None: attached to the URL that the client has. `check` raises where
    the server that has just come up must not be used."""

    def __init__(
        self,
        client: Client,
        health: Health,
        *,
        start: Callable[[], Awaitable[Child]] | None,
        check: Callable[[], Awaitable[None]],
        start_s: float,
    ) -> None:
        self.client, self._health, self._start, self._check = client, health, start, check
        self.start_s = start_s
        self.up, self.failing = asyncio.Event(), asyncio.Event()
        self.why = ""  # it ended, or did not start, the last time
        self.paused = False  # no forward pass would go through
        self.starts = 0
        self.scraped: Callable[[str], None] = lambda text: None  # called with the server's metrics
        self._failed = 0  # starts since it was up
        self._given_up: asyncio.Future[str] | None = None
        self._backoff = Backoff(FIRST_DELAY_S)
        self._waits = ""
        self._say("SGLang: to be started")

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                began = time.monotonic()
                self.why = await self._once()
                if self._failed >= STARTS_TOLERATED:
                    self.failing.set()
                delay = self._backoff.after(time.monotonic() - began)
                metrics.RESTARTS.inc()
                log.warning("sglang_down", reason=self.why, again_in_s=delay)
                self._say(f"SGLang: {self.why}")
                await asyncio.sleep(delay * random.uniform(0.75, 1.0))
        finally:
            self._say("")

    async def _once(self) -> str:
        """From a start to an end; returns why it ended, or did not come up."""
        child, began = None, time.monotonic()
        try:
            self.starts += 1
            self._failed += 1
            self._say("SGLang: loading weights")
            child = await self._start() if self._start is not None else None
            await self._come_up(child)
            self._failed = 0
            self._answers()
            log.info("sglang_up", seconds=round(time.monotonic() - began, 1), starts=self.starts)
            return await self._watch(child)
        except (NotStarted, ServerLost, ServerRefused, OSError, ValueError) as error:
            return str(error)
        except Exception as error:  # a defect here must not leave the replica without its server
            log.exception("sglang_keeper_failed")
            return f"{type(error).__name__}: {error}"
        finally:
            self.up.clear()
            self.paused = False
            metrics.UP.set(0)
            if child is not None:
                await asyncio.shield(child.end(GRACE_S))

    async def _come_up(self, child: Child | None) -> None:
        """Raises NotStarted: it ended, or took longer than `start_s`. One that we are attached to may stand still since a
        replica died over it: that it answers at all is enough, `check` loads and continues."""
        deadline = time.monotonic() + self.start_s
        while not (await self._healthy() if child is not None else await self.client.there(PROBE_S)):
            if child is not None and child.ended.done():
                raise NotStarted(f"ended with {_words(child.ended.result())} while it started: {child.why()}")
            if time.monotonic() > deadline:
                last = f"; its last words: {child.why()}" if child is not None else ""
                raise NotStarted(f"did not answer within sglang_start_s {self.start_s:g} s at {self.client.url}{last}")
            await asyncio.sleep(ASK_EVERY_S)
        self.paused = False
        await self._check()

    async def _watch(self, child: Child | None) -> str:
        """Returns, with the reason, when this server is of no use any more."""
        heard = time.monotonic()
        self._given_up = asyncio.get_running_loop().create_future()
        ends: set[asyncio.Future[Any]] = {self._given_up} if child is None else {self._given_up, child.ended}
        while True:
            done, _ = await asyncio.wait(ends, timeout=PROBE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if child is not None and child.ended in done:
                return f"ended with {_words(child.ended.result())}: {child.why()}"
            if done:
                return self._given_up.result()
            if self.paused or await self._healthy():
                heard = time.monotonic()
                self._answers()
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    self.scraped(await self.client.metrics())
                continue
            self.up.clear()  # what it cannot answer now, another replica can
            metrics.UP.set(0)
            self._say("SGLang: an answer to its health check")
            if child is None:
                return "the server that it is attached to does not answer"
            if time.monotonic() - heard > SILENT_S:
                return f"no healthy answer for {SILENT_S:g} s"

    def give_up(self, reason: str) -> None:
        """Its weights are not those of any version, or it stands still for good: to be started again."""
        self.up.clear()
        if self._given_up is not None and not self._given_up.done():
            self._given_up.set_result(reason)

    def _answers(self) -> None:
        self.up.set()
        metrics.UP.set(1)
        self._say("")

    async def _healthy(self) -> bool:
        return await self.client.healthy(PROBE_S)

    def _say(self, text: str) -> None:
        """What is waited for; "": nothing."""
        if text == self._waits:
            return
        if self._waits:
            self._health.clear(self._waits)
        if text:
            self._health.wait_on(text)
        self._waits = text

    async def wait_up(self, limit_s: float) -> None:
        """Raises ServerLost where it is not up within the limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self.up.wait()
        if not self.up.is_set():
            raise ServerLost(self._waits or "SGLang is not up")


def _words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
