"""What the reward service and its graders say to each other: jobs by Celery, results by the object store.

Celery is a pool of hands, never the record. A job names attempts; what comes of it is one object per trajectory, the verdict
(put if absent: the first one wins), and one per job, the answer, which the service reads, acts on and deletes.

Invariant: a job's gradings are all short or all long (`Item.seconds`), and each sort has a queue of its own. A grading of ten
minutes therefore delays no short one.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractAsyncContextManager

import msgspec
from celery import Celery
from redis import RedisError
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ReadOnlyError

from services.reward import embedded_queue
from shared import watch
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref
from shared.telemetry import Health

QUEUE = "grading"  # of short gradings
LONG_QUEUE = "grading.long"
TASK = "etude.grade"
ANSWERS = "grading"  # prefix of the answers in the object store


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Names one attempt to grade.

    `pack`, `pack_hidden`: the public and the hidden part of the pack that its problem is from; None for `pack`:
    unknown, and the grading fails. `seconds`: how long the grading may take; 0: no longer than the service waits
    anyway. `trace`: headers that put the grader's spans below the service's span; empty: there is no tracing.
    """

    run: str
    key: AttemptKey
    trajectory: Ref
    pack: Ref | None
    pack_hidden: Ref
    seconds: float = 0.0
    trace: dict[str, str] = {}

    @property
    def verdict_key(self) -> str:
        return verdict_key(self.run, self.key, self.trajectory)


class Unreadable(ValueError):
    """The rollout itself is damaged or lost: nothing can be graded, however often it is tried."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`queue`: the queue that carries it."""

    answer_key: str
    items: list[Item]
    queue: str = QUEUE


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Per item, in order: what was graded, or the reason why infrastructure kept it from being."""

    results: list[Graded | str]


def celery_app(url: str) -> Celery:
    """The broker alone: no results, no events, no remote control (each would be another queue to poll)."""
    if url.startswith("redis"):
        from services.reward import redis_queue  # noqa: F401  (what it names replaces the original)

    app = Celery("etude.grading", broker=embedded_queue.broker_url(url), set_as_current=False)
    app.conf.update(
        task_default_queue=QUEUE,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_serializer="json",
        accept_content=["json"],
        # Redis: a killed worker's job would come again after the visibility time-out. The service gives it again sooner.
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        enable_utc=True,
    )
    if url.startswith("redis"):
        # A Redis that hangs must not hold a sender for ever; a worker waits for jobs in looks of a second each.
        app.conf.broker_transport_options = {"socket_connect_timeout": 5.0, "socket_timeout": 20.0}
    return app


def watched(url: str, health: Health) -> AbstractAsyncContextManager[None]:
    """`/readyz` says since when the queue of jobs has not answered. The embedded one is a file, and is not asked."""

    async def ask() -> None:
        async with Redis.from_url(url) as redis:  # a new one each time: what a hang leaves behind is not used again
            await redis.ping()
            with contextlib.suppress(NoPermissionError):  # this user may not ask
                if (await redis.info("replication")).get("role") == "slave":
                    raise ReadOnlyError("it is a replica and refuses every job; name the primary in ETUDE_JOBS")

    if not url.startswith("redis"):
        return contextlib.nullcontext()
    return watch.watched(health, "an answer of the jobs' queue", ask, (RedisError, OSError))
