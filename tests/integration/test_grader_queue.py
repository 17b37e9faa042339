"""Redis hangs: who waits for jobs says so, and a worker that was acknowledging goes on once Redis does."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu import Consumer, Message, Producer, Queue

from infra.servers import state as servers
from services.reward.config import GraderSettings
from services.reward.jobs import celery_app, watched
from shared import watch
from shared.telemetry import Health
from tests.servers import need

WITHIN_S = 30.0


@contextlib.contextmanager
def hanging() -> Iterator[None]:
    process = servers.read()["redis"].process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_worker_whose_acknowledgement_was_lost_takes_the_next_job() -> None:
    app = celery_app(need("ETUDE_JOBS")["ETUDE_JOBS"])
    app.conf.broker_transport_options = {"socket_connect_timeout": 1.0, "socket_timeout": 1.0}
    got: list[Message] = []
    with app.connection_for_read() as connection:
        channel = connection.channel()
        channel.basic_qos(0, 1, False)  # one job at a time, as a grader
        queue = Queue(f"test.{uuid.uuid4().hex[:12]}", channel=channel)
        queue.declare()
        for job in ("first", "second"):
            Producer(channel).publish(job, routing_key=queue.name, serializer="json")
        with Consumer(channel, [queue], on_message=got.append):
            connection.drain_events(timeout=WITHIN_S)
            assert [message.decode() for message in got] == ["first"]
            with hanging(), pytest.raises(connection.connection_errors):
                got[0].ack()
            connection.drain_events(timeout=WITHIN_S)
            assert [message.decode() for message in got] == ["first", "second"]
            got[1].ack()
        queue.delete()


def test_readyz_says_that_the_queue_is_away_until_it_answers_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.2)
    monkeypatch.setattr(watch, "WITHIN_S", 0.5)
    url = need("ETUDE_JOBS")["ETUDE_JOBS"]

    async def until(condition) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def scenario() -> None:
        health = Health("grader", GraderSettings(state=tmp_path))
        async with watched(url, health):
            assert not health.ready  # not before it has answered
            await until(lambda: health.ready)
            with hanging():
                await until(lambda: not health.ready)
            await until(lambda: health.ready)

    asyncio.run(scenario())
