"""The engine: continuous batching (`batching`) in one thread of its own, and the ways to it from all others.

Invariants:
- The model and the cache are touched by the engine's thread alone; others hand over functions (`call`) that run between
  two steps. A weight swap is such a function.
- `request.done` is called once for every request that was taken, whatever fails and whoever stops the engine.
- Where MOST_FAILED steps fail one after the other it ends by itself, and says why: each of them cost everybody what ran.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog
import torch

from services.inference import metrics
from services.inference.batching import Batch
from services.inference.cache import ACTIVE, SlotCache
from services.inference.request import Request
from shared.model import Transformer

T = TypeVar("T")
IDLE_WAIT_S = 60.0  # how long the idle thread sleeps; every hand-over wakes it
STOPPED = "the engine is shutting down"
MOST_FAILED = 5  # in a row: what goes on so, a new process may mend, and this one does not

log = structlog.get_logger()


class Overloaded(RuntimeError):
    """More requests wait than the engine takes on, or it takes none any more."""


class Engine:
    """`submit`, `abort`, `call` from any thread. `start` before, `stop` after."""

    def __init__(
        self,
        model: Transformer,
        serial: int,
        *,
        rows: int,
        positions: int,
        prefill_tokens: int,
        queue_limit: int,
        draft_tokens: int = 0,
        gated: bool = True,
        threads: int = 1,
        failed: Callable[[str], object] | None = None,
    ) -> None:
        """Computes where the model's weights lie, in their type. `threads`: of torch, on a CPU; the compiled step of small models
        has one. `failed`: called from its thread, with the reason, where it can go on no more."""
        self.batch = Batch(
            model,
            serial,
            rows=rows,
            positions=positions,
            prefill_tokens=prefill_tokens,
            draft_tokens=draft_tokens,
            gated=gated,
        )
        self.queue_limit = queue_limit
        self.paused = False
        self._threads, self._failed = threads, failed
        self._arriving = 0  # submitted, and not in the batch's queue yet
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped, self._over = False, STOPPED
        self._entrance = threading.Lock()  # nothing is put into the inbox of an engine that has stopped
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- from other threads ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Aborts what runs and ends the thread."""
        with contextlib.suppress(RuntimeError):
            self.call(self._stop).result(timeout=30)
            self._thread.join(timeout=30)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopped

    @property
    def model(self) -> Transformer:
        return self.batch.model

    @property
    def serial(self) -> int:
        return self.batch.serial

    @property
    def cache(self) -> SlotCache:
        return self.batch.cache

    @property
    def steps(self) -> int:
        return self.batch.steps

    @property
    def running(self) -> int:
        return self.batch.running

    @property
    def waiting(self) -> int:
        """Those without a row, also what comes in while a step is under way."""
        return self._arriving + len(self.batch.waiting)

    def submit(self, request: Request) -> None:
        """`request.done` is called once, from the engine's thread. Raises Overloaded, and ValueError for what can never run."""
        vocabulary, tokens = self.model.config.vocab_size, request.tokens_P
        if not 0 < len(tokens) <= self.cache.positions:
            raise ValueError(f"input_ids has {len(tokens)} tokens; allowed: 1..{self.cache.positions}")
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise ValueError(f"input_ids: found {int(tokens.max())} or a negative id; allowed: 0..{vocabulary - 1}")
        with self._entrance:
            if self._stopped:
                raise Overloaded(self._over)
            soon = 0 if self.paused else self.cache.rows - self.running  # have a row before the next step
            if self.waiting - soon >= self.queue_limit:
                raise Overloaded(f"{self.waiting} requests wait; the limit is {self.queue_limit}")
            self._arriving += 1
            self._inbox.put(lambda: self._take(request))

    def _take(self, request: Request) -> None:
        self.batch.waiting.append(request)
        with self._entrance:
            self._arriving -= 1

    def abort(self, request: Request, message: str) -> None:
        """Ends it with what it has; nothing happens if it is over already."""
        self._inbox.put(lambda: self.batch.abort(request, message))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function` on the engine's thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._entrance:
            if not self.alive:
                raise RuntimeError("the engine is stopped")
            self._inbox.put(run)
        return future

    def swap(self, model: Transformer, serial: int) -> Future[float]:
        """From the next step on, `model` samples; running sessions keep their cache. Returns the pause in seconds."""
        asked = time.perf_counter()
        fused = self.batch.compiled(model)

        def exchange() -> float:
            started = time.perf_counter()
            self.batch.use(model, serial, fused)
            metrics.SWAP_WAIT.observe(started - asked)
            return time.perf_counter() - started

        return self.call(exchange)

    def pause(self, *, abort: bool) -> Future[None]:
        """No step until `proceed`. abort: end what runs; else it is continued where it stood, cache kept."""

        def run() -> None:
            self.paused = True
            if abort:
                self.batch.abort_all("paused")

        return self.call(run)

    def proceed(self) -> Future[None]:
        return self.call(lambda: setattr(self, "paused", False))

    def flush(self) -> Future[None]:
        return self.call(self.cache.flush)

    def abort_all(self, message: str) -> Future[None]:
        return self.call(lambda: self.batch.abort_all(message))

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                self._loop()
        except Exception as error:  # not even those who wait could be told
            log.exception("engine_failed")
            self._end(f"{type(error).__name__}: {error}")
        if self._over != STOPPED and self._failed is not None:
            self._failed(self._over)

    def _loop(self) -> None:
        failed, suspects = 0, frozenset[bytes]()
        while not self._stopped:
            self._drain(block=self.paused or not (self.waiting or self.running))
            if self.paused or self._stopped:
                continue
            try:
                self.batch.admit()
                if self.running:
                    self.batch.step()
                    failed = 0
            except Exception as error:
                # A defect or no memory: nobody is left waiting, and the next request finds us.
                prompts = self.batch.prompts()
                failed, suspects = failed + 1, suspects & prompts if failed else prompts
                reason = f"{type(error).__name__}: {error}"
                log.exception("step_failed", in_a_row=failed)
                self.batch.abort_all(f"the engine failed: {reason}")
                if (
                    failed >= MOST_FAILED and not suspects
                ):  # else one request, asked again and again, may be what breaks them
                    self._end(f"{failed} steps failed one after the other, the last by {reason}")
                    self._drain(block=False)  # what came in before
        self.batch.abort_all(self._over)  # what came in while it stopped

    def _drain(self, *, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            if block:
                self._inbox.get(timeout=IDLE_WAIT_S)()
            while True:
                self._inbox.get_nowait()()

    def _stop(self) -> None:
        self.batch.abort_all(STOPPED)
        self._end(STOPPED)

    def _end(self, reason: str) -> None:
        with self._entrance:
            self._stopped, self._over = True, reason

    def state(self) -> dict[str, Any]:
        """A glance from any thread; the figures may be of different moments."""
        held, positions = self.cache.active_positions, self.cache.rows * self.cache.positions
        return {
            "running": self.running,
            "waiting": self.waiting,
            "active_rows": int((self.cache.state == ACTIVE).sum()),
            "token_usage": held / positions,
        }
