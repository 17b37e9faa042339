"""`python -m services.reward.grader`: a Celery worker that grades.

The worker takes one job of each queue at a time and runs the attempts of functions in `grader_sandboxes` sandboxes at once; to
grade more, start more graders. Each queue has a thread and a Celery worker of its own, so a long grading delays no short one;
`grader_queues` limits a grader to one of them. SIGTERM: the jobs in hand are finished, no other is taken.

A grader whose sandbox breaks takes no more jobs until a sandbox works again, and is not ready meanwhile. It leaves the job
in hand without an answer, like one that died: the service gives it again, and no attempt is blamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import structlog
from celery.worker import WorkController, state
from kombu.asynchronous import set_event_loop
from prometheus_client import Counter

from services.reward.config import GraderSettings
from services.reward.formats import Formats
from services.reward.grade import Grader
from services.reward.jobs import LONG_QUEUE, QUEUE, TASK, Job, celery_app, watched
from services.reward.judge import RUBRIC, Endpoint, Judge
from services.reward.term_workers import TermWorkers
from shared import objects
from shared.environments import Places
from shared.environments.places import opened_places
from shared.environments.registry import Environments
from shared.objects import Objects
from shared.sandbox import SandboxUnavailable
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining
from shared.telemetry_spans import span

ATTEMPTS = Counter("etude_grader_attempts_total", "Attempts graded, by outcome.", ["outcome"])
QUARANTINED = Counter("etude_grader_terms_quarantined_total", "Attempts for which a term had no answer.", ["term"])
SECONDS = Counter("etude_grader_busy_seconds_total", "Time spent on jobs.")
CANARY_EVERY_S = 5.0
JOIN_S = 60.0  # a short job takes a second or two; a long one may be left, and the service gives it again
_HUBS = threading.Lock()  # Celery keeps its loop in a global, from which a worker takes it once
QUEUES = {"both": (QUEUE, LONG_QUEUE), "short": (QUEUE,), "long": (LONG_QUEUE,)}

log = structlog.get_logger()


async def sandbox_ready(environments: Environments, health: Health, stop: asyncio.Event) -> bool:
    """Waits until a sandbox works: a grader without one would take jobs only to fail them. False: told to stop."""
    while not stop.is_set():
        try:
            await environments.check()
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
    """Celery's worker for one queue, in a thread of this process. `finished` is set when it has ended, whatever ended it. `ready`
    returns when a sandbox works again, or when this process is told to stop."""

    def __init__(
        self,
        settings: GraderSettings,
        grader: Grader,
        ready: Callable[[], Coroutine[Any, Any, object]],
        queue: str = QUEUE,
    ) -> None:
        self._app = celery_app(settings.jobs_url)
        self._queue = queue
        self.finished = asyncio.Event()
        self._loop = asyncio.get_running_loop()

        @self._app.task(name=TASK, shared=False)  # not of every other app in this process
        def grade(job: dict) -> None:
            started = time.perf_counter()
            asked = msgspec.convert(job, Job)
            log.debug("job_begun", attempts=[item.key.attempt for item in asked.items])
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
                for name in () if isinstance(result, str) else result.quarantined:
                    QUARANTINED.labels(name).inc()
            SECONDS.inc(time.perf_counter() - started)

        self._thread = threading.Thread(target=self._run, name=f"celery-{queue}", daemon=True)

    def start(self) -> None:
        state.should_stop = None
        self._thread.start()

    async def stop(self) -> None:
        state.should_stop = 0  # an exit status: leave after the job in hand
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _run(self) -> None:
        self._app.set_current()  # of this thread; Celery finds a task's code by it
        try:
            with _HUBS:
                set_event_loop(None)  # workers that share a loop die when one of them connects again, and closes it
                controller = WorkController(
                    app=self._app,
                    pool_cls="solo",
                    concurrency=1,
                    queues=[self._queue],
                    without_gossip=True,
                    without_mingle=True,
                    without_heartbeat=True,
                    hostname=f"{self._queue}@local",
                    loglevel="WARNING",
                )
            controller.start()
        except Exception:
            log.exception("grader_stopped")
        finally:
            self._loop.call_soon_threadsafe(self.finished.set)


async def run(settings: GraderSettings) -> None:
    async with draining() as stop, Health("grader", settings) as health:
        store = objects.connect(settings.objects_url)
        async with opened_places(settings, settings.grader_sandboxes, store, settings.sandbox) as places:
            if not await sandbox_ready(Environments(places), health, stop):
                return
            async with _working(settings, places, store, health, stop) as workers, watched(settings.jobs_url, health):
                ended = [asyncio.create_task(each.wait()) for each in (stop, *(one.finished for one in workers))]
                await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
                if not stop.is_set():
                    raise SystemExit("grader: a Celery worker ended by itself; see the log above")


def judge_of(settings: GraderSettings, store: Objects) -> Judge | None:
    """Return the judge that the settings name; None: they name none."""
    if not settings.judge_url:
        return None
    rubric = RUBRIC if settings.judge_rubric is None else settings.judge_rubric.read_text()
    key = settings.judge_key.get_secret_value()
    return Judge(Endpoint(settings.judge_url, settings.judge_model, key, rubric, settings.judge_s), store)


@contextlib.asynccontextmanager
async def _working(
    settings: GraderSettings, places: Places, store: Objects, health: Health, stop: asyncio.Event
) -> AsyncIterator[list[Worker]]:
    """Run a worker for each queue. Each has its own environments, packs and term worker: none of them is for two threads."""
    terms, workers = [], []
    for queue in QUEUES[settings.grader_queues]:
        environments = Environments(places)
        terms.append(TermWorkers())
        formats = Formats(store, settings.state / "grader" / "formats")
        grader = Grader(
            store, environments, health.name, workers=terms[-1], formats=formats, judge=judge_of(settings, store)
        )
        ready = partial(sandbox_ready, environments, health, stop)
        workers.append(Worker(settings, grader, ready, queue))
        workers[-1].start()
    try:
        yield workers
    finally:
        await asyncio.gather(*(worker.stop() for worker in workers))
        for each in terms:
            each.close()


def main() -> None:
    settings = load(GraderSettings)
    configure_logs("grader", settings)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
