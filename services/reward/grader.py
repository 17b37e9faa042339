"""`python -m services.reward.grader`: a Celery worker that grades.

The worker takes one job at a time and runs its attempts in `grader_sandboxes` sandboxes at once; to grade more, start more
graders. It runs in a thread beside the health endpoints. SIGTERM: the job in hand is finished, no other is taken.

A grader whose sandbox breaks takes no more jobs until a sandbox works again, and is not ready meanwhile. It leaves the job
in hand without an answer, like one that died: the service gives it again, and no attempt is blamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog
from celery.worker import WorkController, state
from prometheus_client import Counter

from services.reward.config import GraderSettings
from services.reward.grade import CANARY, Grader
from services.reward.jobs import QUEUE, TASK, Job, celery_app, watched
from shared import objects, sandbox
from shared.sandbox import SandboxUnavailable
from shared.sandbox.pool import FunctionPool
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining
from shared.telemetry_spans import span

ATTEMPTS = Counter("etude_grader_attempts_total", "Attempts graded, by outcome.", ["outcome"])
SECONDS = Counter("etude_grader_busy_seconds_total", "Time spent on jobs.")
CANARY_EVERY_S = 5.0
JOIN_S = 60.0  # a job in hand takes a second or two

log = structlog.get_logger()


async def sandbox_ready(functions: FunctionPool, health: Health, stop: asyncio.Event) -> bool:
    """Waits until a sandbox works: a grader without one would take jobs only to fail them. False: told to stop."""
    while not stop.is_set():
        try:
            await functions.run([CANARY])
        except SandboxUnavailable as error:
            health.wait_on("sandbox")
            log.error("sandbox_unavailable", error=str(error))
            try:
                async with asyncio.timeout(CANARY_EVERY_S):
                    await stop.wait()
            except TimeoutError:
                continue
        else:
            health.clear("sandbox")
            return True
    return False


class Worker:
    """Celery's worker in a thread of this process. `finished` is set when it has ended, whatever ended it. `ready` returns
    when a sandbox works again, or when this process is told to stop."""

    def __init__(
        self, settings: GraderSettings, grader: Grader, ready: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        self._app = celery_app(settings.jobs_url)
        self.finished = asyncio.Event()
        self._loop = asyncio.get_running_loop()

        @self._app.task(name=TASK, shared=False)  # not of every other app in this process
        def grade(job: dict) -> None:
            started = time.perf_counter()
            asked = msgspec.convert(job, Job)
            try:
                with contextlib.ExitStack() as together:  # one go in the sandbox, a span for each attempt
                    for item in asked.items:
                        about = item.key
                        together.enter_context(
                            span(
                                "hidden tests",
                                item.trace,
                                attempt=about.attempt,
                                epoch=about.epoch,
                                job=len(asked.items),
                            )
                        )
                    answer = grader.work(asked)
            except SandboxUnavailable as error:
                log.error("sandbox_unavailable", error=str(error))
                # The thread that would take the next job waits here: each one taken would be lost within milliseconds.
                asyncio.run_coroutine_threadsafe(ready(), self._loop).result()
                return
            for result in answer.results:
                ATTEMPTS.labels("failed" if isinstance(result, str) else "graded").inc()
            SECONDS.inc(time.perf_counter() - started)

        self._thread = threading.Thread(target=self._run, name="celery", daemon=True)

    def start(self) -> None:
        state.should_stop = None
        self._thread.start()

    async def stop(self) -> None:
        state.should_stop = 0  # an exit status: leave after the job in hand
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _run(self) -> None:
        self._app.set_current()  # of this thread; Celery finds a task's code by it
        try:
            WorkController(
                app=self._app,
                pool_cls="solo",
                concurrency=1,
                queues=[QUEUE],
                without_gossip=True,
                without_mingle=True,
                without_heartbeat=True,
                hostname="grader@local",
                loglevel="WARNING",
            ).start()
        except Exception:
            log.exception("grader_stopped")
        finally:
            self._loop.call_soon_threadsafe(self.finished.set)


async def run(settings: GraderSettings) -> None:
    async with draining() as stop, Health("grader", settings) as health:
        functions = sandbox.connect(settings.sandbox, settings.grader_sandboxes)
        try:
            if not await sandbox_ready(functions, health, stop):
                return
            worker = Worker(
                settings,
                Grader(objects.connect(settings.objects_url), functions, health.name),
                lambda: sandbox_ready(functions, health, stop),
            )
            worker.start()
            async with watched(settings.jobs_url, health):
                ended = [asyncio.create_task(stop.wait()), asyncio.create_task(worker.finished.wait())]
                await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
                if worker.finished.is_set() and not stop.is_set():
                    raise SystemExit("grader: the Celery worker ended by itself; see the log above")
                await worker.stop()
        finally:
            await functions.close()


def main() -> None:
    settings = load(GraderSettings)
    configure_logs("grader", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
