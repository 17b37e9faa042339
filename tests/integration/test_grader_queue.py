"""The queues of jobs: long gradings delay no short one; when Redis hangs, graders and the service say so and recover."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kombu import Consumer, Message, Producer, Queue
from redis import Redis

from infra.servers import fleet, state
from services.reward.config import GraderSettings
from services.reward.grader import QUEUES
from services.reward.jobs import LONG_QUEUE, QUEUE, celery_app, watched
from shared import watch
from shared.contracts.messages import RolloutScored
from shared.environments import Environment, Grading
from shared.environments.registry import Environments
from shared.sandbox import connect as connect_sandbox
from shared.telemetry import Health
from tests.integration.reward_platform import RIGHT, platform
from tests.patience import eventually, patient
from tests.servers import need, own_jobs
from tests.standstill import stand_still

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a Redis that only the tests of this file use: it hangs at their word."""
    need("ETUDE_JOBS")  # its programs are here
    folder = tmp_path_factory.mktemp("redis") / "servers"
    try:
        fleet.up(["redis"], folder)
        yield folder
    finally:
        fleet.down(folder)


@contextlib.contextmanager
def hanging(redis: Path) -> Iterator[None]:
    process = state.read(redis)["redis"].process
    assert process is not None
    stand_still(process)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_worker_whose_acknowledgement_was_lost_takes_the_next_job(redis: Path) -> None:
    app = celery_app(state.settings(redis)["ETUDE_JOBS"])
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
            connection.drain_events(timeout=patient(WITHIN_S))
            assert [message.decode() for message in got] == ["first"]
            with hanging(redis), pytest.raises(connection.connection_errors):
                got[0].ack()
            connection.drain_events(timeout=patient(WITHIN_S))
            assert [message.decode() for message in got] == ["first", "second"]
            got[1].ack()
        queue.delete()


def test_readyz_says_that_the_queue_is_away_until_it_answers_again(redis: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(watch, "ASK_EVERY_S", 0.2)
    monkeypatch.setattr(watch, "WITHIN_S", 0.5)
    url = state.settings(redis)["ETUDE_JOBS"]

    async def scenario() -> None:
        health = Health("grader", GraderSettings(state=tmp_path))
        async with watched(url, health):
            assert not health.ready  # not before it has answered
            await eventually(lambda: health.ready)
            with hanging(redis):
                await eventually(lambda: not health.ready)
            await eventually(lambda: health.ready)

    asyncio.run(scenario())


@pytest.fixture(params=["embedded", "redis"])
def jobs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Jobs through the embedded queue, then through a database of Redis of this test's own."""
    if request.param == "embedded":
        monkeypatch.delenv("ETUDE_JOBS", raising=False)
        yield
        return
    url = own_jobs()
    monkeypatch.setenv("ETUDE_JOBS", url)
    yield
    with Redis.from_url(url) as client:
        client.flushdb()


class Gated(Environments):
    """Environments whose gradings of marked sources last until the gate opens."""

    MARK = "# takes ten minutes\n"
    gate: threading.Event
    begun: threading.Event

    def named(self, kind: str) -> Environment[Any, Any]:
        environment, gate, begun = super().named(kind), self.gate, self.begun

        class Behind(type(environment)):  # type: ignore[misc]
            async def grade(self, items: Sequence[Grading]) -> Any:
                if any(Gated.MARK in item.submission.files["main.py"] for item in items):
                    begun.set()
                    await asyncio.to_thread(gate.wait)
                return await environment.grade(items)

        return Behind(self.places)


@pytest.mark.usefixtures("jobs")
def test_a_grading_that_takes_long_delays_no_short_one(tmp_path: Path) -> None:
    """The short one is scored while the long one is being graded, by the same grader. It would wait for ever in one queue."""
    Gated.gate, Gated.begun = threading.Event(), threading.Event()
    functions = connect_sandbox("process", workers=1)

    async def scenario() -> None:
        queues = QUEUES["both"]
        assert queues == (QUEUE, LONG_QUEUE)
        async with platform(tmp_path, 30.0) as p, p.service(), p.grader_here(functions, queues, Gated):
            try:
                await p.announce()
                await p.finish("long", Gated.MARK + RIGHT, grading_s=600.0)
                assert await asyncio.to_thread(Gated.begun.wait, patient(WITHIN_S))
                for name in ("short", "shorter"):
                    await p.finish(name, RIGHT)
                    scored = await p.outcome(name)
                    assert isinstance(scored, RolloutScored)
                    assert scored.verdict.solved
                assert "long" not in p.outcomes
            finally:
                Gated.gate.set()
            scored = await p.outcome("long")
            assert isinstance(scored, RolloutScored)
            assert scored.verdict.solved

    try:
        asyncio.run(scenario())
    finally:
        functions.close_sync()


def test_a_grader_whose_connections_are_lost_in_mid_job_goes_on_with_both_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_jobs()
    monkeypatch.setenv("ETUDE_JOBS", url)
    Gated.gate, Gated.begun = threading.Event(), threading.Event()
    functions = connect_sandbox("process", workers=1)

    async def scenario() -> None:
        async with platform(tmp_path, 4.0) as p, p.service(), p.grader_here(functions, QUEUES["both"], Gated):
            try:
                await p.announce()
                await p.finish("in hand", Gated.MARK + RIGHT, grading_s=600.0)
                assert await asyncio.to_thread(Gated.begun.wait, patient(WITHIN_S))
                with Redis.from_url(url) as client:
                    mine = client.client_id()
                    for one in client.client_list():
                        if one["db"] == url.rpartition("/")[2] and int(one["id"]) != mine:
                            client.client_kill_filter(_id=one["id"])
                await p.finish("short", RIGHT)
                assert isinstance(await p.outcome("short"), RolloutScored)
            finally:
                Gated.gate.set()
            await p.finish("long", RIGHT, grading_s=600.0)
            await p.finish("shorter", RIGHT)
            for name in ("in hand", "long", "shorter"):
                assert isinstance(await p.outcome(name), RolloutScored)

    try:
        asyncio.run(scenario())
    finally:
        functions.close_sync()
        with Redis.from_url(url) as client:
            client.flushdb()
