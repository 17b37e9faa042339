"""The graders as the service sees them: attempts in, verdicts out. Batches, patience, second chances.

Invariants:
- An attempt ends with a verdict or with GradingFailed, whatever becomes of single jobs; answers that come late still count.
- A job that waits its turn is no silent one: slow candidates before it may take minutes. It is overdue when one that was sent
  after it was answered a patience ago, or when for as long nothing was answered at all.
- Silence is no failure of an attempt while all graders are silent: it is asked for again and again, in ever smaller jobs,
  ever more patiently. Only an attempt whose own jobs, alone, stay unanswered while later ones are answered (it seems to
  kill its grader) is given up.
- Gradings that take long (`Item.seconds`) go in small jobs of their own, through a queue of their own. Each queue has a patience
  of its own, which grows by its longest job that is out: a grader that is busy with one is not silent.
- Reported failures of infrastructure are counted; after `tries` the attempt is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import structlog

from services.reward import metrics
from services.reward.jobs import ANSWERS, LONG_QUEUE, QUEUE, TASK, Answer, Item, Job, celery_app
from shared.contracts.graded import Graded
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.telemetry import Health

LOOK_S = 0.05  # between looks for an answer, while any is outstanding
FIRST_DELAY_S, LAST_DELAY_S = 1.0, 15.0  # after a reported failure; doubles
SLOW_BATCH = 4  # attempts of a job whose gradings take long: as many as a grader with a few cores runs at a time
MAX_SILENT = 3  # unanswered jobs of one attempt alone
MOST_PATIENCES = 8  # between two jobs for the same attempts while no grader answers; doubles up to here
FORGET_AFTER = 20  # patiences; then an unanswered job is not looked for any more

log = structlog.get_logger()


class GradingFailed(Exception):
    """Infrastructure, not the attempt: there is no verdict and there will be none."""


class Jobs(Protocol):
    async def send(self, job: Job) -> None:
        """Durable in the queue when it returns."""

    async def close(self) -> None: ...


class CeleryJobs:
    """One thread does the sending: Celery's producer is blocking and wants to be used by one."""

    def __init__(self, url: str) -> None:
        self._app = celery_app(url)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="celery")

    async def send(self, job: Job) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._send, job)

    def _send(self, job: Job) -> None:
        self._app.send_task(TASK, args=[msgspec.to_builtins(job)], queue=job.queue, retry=False)

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._app.close()


@dataclass(slots=True, eq=False)
class _Pending:
    item: Item
    future: asyncio.Future[Graded]
    failures: int = 0
    silent: int = 0


class _Chunk(NamedTuple):
    """Attempts that wait to be sent. `whole`: as a job of their own, with no others."""

    pending: list[_Pending]
    whole: bool = False
    patiences: int = 1


@dataclass(slots=True, eq=False)
class _Sent:
    key: str
    pending: list[_Pending]
    patiences: int
    at: float = 0.0
    overtaken: float | None = None  # when the first answer came to a job that was sent later
    given_again: float | None = None


@dataclass(slots=True, eq=False)
class _Lane:
    """One queue and the graders behind it. `size`: attempts per job, at most. `waits_on`: the health check that says that no
    grader answers. `answered`: when the last answer came."""

    queue: str
    size: int
    waits_on: str
    waiting: asyncio.Queue[_Chunk] = field(default_factory=asyncio.Queue)
    sent: list[_Sent] = field(default_factory=list)
    answered: float = 0.0

    def patience_s(self, setting: float) -> float:
        """Return the setting plus the longest job that is out."""
        longest = (sum(p.item.seconds for p in sent.pending) for sent in self.sent if sent.given_again is None)
        return setting + max(longest, default=0.0)

    def overdue(self, sent: _Sent, now: float, setting: float) -> bool:
        patience_s = self.patience_s(setting)
        if sent.overtaken is not None:
            return now - sent.overtaken > patience_s
        return now - max(sent.at, self.answered) > sent.patiences * patience_s


@dataclass(slots=True)
class Graders:
    """`async with Graders(...)` runs the background work; `grade` may be called by any number of tasks."""

    jobs: Jobs
    objects: Objects
    health: Health
    batch: int
    linger_s: float
    patience_s: float
    tries: int
    _short: _Lane = field(init=False)
    _long: _Lane = field(init=False)
    _any_sent: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._short = _Lane(QUEUE, self.batch, "graders")
        self._long = _Lane(LONG_QUEUE, min(self.batch, SLOW_BATCH), "graders of long gradings")

    async def __aenter__(self) -> Graders:
        await asyncio.to_thread(self._sweep)
        self._tasks = [
            asyncio.create_task(self._send_batches(self._short)),
            asyncio.create_task(self._send_batches(self._long)),
            asyncio.create_task(self._look()),
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def ended(self) -> None:
        """Returns never; raises what the background work ended with. Nothing is graded any more then."""
        await asyncio.gather(*self._tasks)

    async def grade(self, item: Item) -> Graded:
        """Raises GradingFailed."""
        pending = _Pending(item, asyncio.get_running_loop().create_future())
        lane = self._long if item.seconds else self._short
        lane.waiting.put_nowait(_Chunk([pending]))
        return await pending.future

    @property
    def _prefix(self) -> str:
        return f"{ANSWERS}/{self.health.name}"

    def _sweep(self) -> None:
        """Answers to a former life of this replica: its attempts come again from the bus, and find their verdicts."""
        with contextlib.suppress(OSError):
            self._delete(list(self.objects.list(f"{self._prefix}/")))

    async def _send_batches(self, lane: _Lane) -> None:
        while True:
            chunk = await lane.waiting.get()
            if not chunk.whole:
                chunk = await self._gather(chunk.pending, lane)
            await self._send(chunk, lane)

    async def _gather(self, batch: list[_Pending], lane: _Lane) -> _Chunk:
        """More of the same until the batch is full or has waited long enough."""
        deadline = time.monotonic() + self.linger_s
        while len(batch) < lane.size:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    following = await lane.waiting.get()
            except TimeoutError:
                break
            if following.whole:
                await self._send(following, lane)
            else:
                batch += following.pending
        return _Chunk(batch)

    async def _send(self, chunk: _Chunk, lane: _Lane) -> None:
        sent = _Sent(f"{self._prefix}/{uuid.uuid4().hex}.json", chunk.pending, chunk.patiences)
        job = Job(answer_key=sent.key, items=[p.item for p in chunk.pending], queue=lane.queue)
        delay = 0.1
        while True:
            try:
                await self.jobs.send(job)
                break
            except Exception as error:  # whatever the broker's client raises: the queue is away
                log.warning("jobs_unavailable", error=f"{type(error).__name__}: {error}")
                self.health.wait_on("jobs")
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(LAST_DELAY_S, delay * 2)
        self.health.clear("jobs")
        metrics.JOBS.inc()
        sent.at = time.monotonic()
        lane.sent.append(sent)
        self._any_sent.set()

    async def _look(self) -> None:
        lanes = (self._short, self._long)
        while True:
            if not any(lane.sent for lane in lanes):
                self._any_sent.clear()
                await self._any_sent.wait()
            await asyncio.sleep(LOOK_S)
            answers, error = await asyncio.to_thread(self._read, [sent.key for lane in lanes for sent in lane.sent])
            if error is None:
                self.health.clear("objects")
            else:  # the object store is away; the other answers will not run away
                log.warning("objects_unavailable", error=f"{type(error).__name__}: {error}")
                self.health.wait_on("objects")
            now = time.monotonic()
            for lane in lanes:
                self._examine(lane, answers, now, complete=error is None)
            if error is not None:
                await asyncio.sleep(FIRST_DELAY_S)

    def _examine(self, lane: _Lane, answers: Mapping[str, Answer], now: float, *, complete: bool) -> None:
        """Act on the answers. `complete`: False: the object store failed, so an unread answer may be there."""
        for sent in list(lane.sent):
            answer = answers.get(sent.key)
            if answer is not None and len(answer.results) != len(sent.pending):  # no answer to this job
                log.warning("answer_unfit", key=sent.key, results=len(answer.results), expected=len(sent.pending))
            elif answer is not None:
                lane.sent.remove(sent)
                self._settle(lane, sent, answer)
                continue
            if not complete:
                continue
            if sent.given_again is not None:
                if now - sent.given_again > FORGET_AFTER * lane.patience_s(self.patience_s):
                    lane.sent.remove(sent)
            elif lane.overdue(sent, now, self.patience_s):
                self._give_again(lane, sent, now)

    def _read(self, keys: list[str]) -> tuple[dict[str, Answer], Exception | None]:
        """Takes the answers that are there; and what kept us from looking further. What was taken is always returned:
        it is nowhere else any more."""
        found: dict[str, Answer] = {}
        failure: Exception | None = None
        for key in keys:
            try:
                found[key] = msgspec.json.decode(self.objects.get(self.objects.head(key)), type=Answer)
            except ObjectMissing:
                continue
            except (ObjectDamaged, msgspec.DecodeError) as error:  # no answer; after a patience it is asked for again
                log.warning("answer_unreadable", key=key, error=f"{type(error).__name__}: {error}")
                self._delete([key])
            except Exception as error:  # whatever an adapter raises while its store is away
                failure = error
                break
        self._delete(list(found))
        return found, failure

    def _delete(self, keys: list[str]) -> None:
        """What cannot be deleted now is swept at the next start."""
        with contextlib.suppress(OSError):
            for key in keys:
                self.objects.delete(key)

    def _settle(self, lane: _Lane, sent: _Sent, answer: Answer) -> None:
        lane.answered = now = time.monotonic()
        for earlier in lane.sent:
            if earlier.at < sent.at and earlier.overtaken is None:
                earlier.overtaken = now
        self.health.clear(lane.waits_on)
        for pending, result in zip(sent.pending, answer.results, strict=True):
            if pending.future.done():
                continue
            if isinstance(result, Graded):
                pending.future.set_result(result)
                continue
            pending.failures += 1
            if pending.failures >= self.tries:
                pending.future.set_exception(GradingFailed(result))
                continue
            delay = min(LAST_DELAY_S, FIRST_DELAY_S * 2 ** (pending.failures - 1))
            log.warning("grading_failed", attempt=pending.item.key.attempt, reason=result, again_in_s=delay)
            asyncio.get_running_loop().call_later(delay, lane.waiting.put_nowait, _Chunk([pending]))

    def _give_again(self, lane: _Lane, sent: _Sent, now: float) -> None:
        sent.given_again, overtaken = now, sent.overtaken is not None
        pending = [p for p in sent.pending if not p.future.done()]
        if not pending:
            return
        if not overtaken:
            self.health.wait_on(lane.waits_on)
        log.warning("grading_overdue", attempts=len(pending), overtaken=overtaken)
        if len(pending) == 1:
            pending[0].silent += overtaken
            if pending[0].silent >= MAX_SILENT:
                reason = f"{MAX_SILENT} jobs for it alone went unanswered while later ones were answered: does it kill graders?"
                pending[0].future.set_exception(GradingFailed(reason))
                return
        half = (len(pending) + 1) // 2
        patiences = 1 if overtaken or lane.answered > sent.at else min(MOST_PATIENCES, 2 * sent.patiences)
        for part in (pending[:half], pending[half:]):
            if part:
                lane.waiting.put_nowait(_Chunk(part, whole=True, patiences=patiences))
        if len(pending) == 1 and not overtaken:
            # The last of all has nobody behind it that could overtake it. An empty job tells a killer from graders that are away.
            lane.waiting.put_nowait(_Chunk([], whole=True))
