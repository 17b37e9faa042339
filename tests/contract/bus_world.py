"""A log to test, on either adapter, and what tests say to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from kafka import KafkaProducer
from kafka.record.default_records import DefaultRecordBatchBuilder

from infra.servers import FOLDER, fleet
from infra.servers import state as servers
from shared.bus import Bus, BusUnavailable, Delivery, connect
from shared.bus.assignment import partition_of
from shared.bus.kafka_cluster import Cluster
from shared.bus.sqlite import SqliteBus
from shared.contracts.codec import Raw
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic
from tests.patience import patient
from tests.servers import need
from tests.standstill import stand_still

MEMBER = Path(__file__).with_name("bus_member.py")
PATIENCE_S = 150.0  # a promise that is not kept in this time counts as broken, on a machine busy with other work too


NULL = b"\0null"


@contextlib.contextmanager
def null_headers() -> Iterator[None]:
    """Header values NULL are written as none at all: Kafka and other clients have such, kafka-python's producer refuses
    them."""
    write = DefaultRecordBatchBuilder.append

    def append(self: Any, *args: Any) -> Any:
        *before, headers = args
        return write(self, *before, [(name, None if value == NULL else value) for name, value in headers])

    with patch.object(DefaultRecordBatchBuilder, "append", append):
        yield


def alert(what: object) -> Alert:
    return Alert(run="r", name="n", severity="info", what=str(what))


@dataclass
class World:
    """One log and what a test needs to talk about it."""

    url: str
    topic: Topic
    opened: list[Bus]
    group: str = field(default_factory=lambda: f"g.{uuid.uuid4().hex[:12]}")
    members: list[subprocess.Popen[str]] = field(default_factory=list)
    servers: Path = FOLDER  # of the broker

    def open(self, client: str = "test") -> Bus:
        bus = connect(self.url, client=client)
        self.opened.append(bus)
        return bus

    @property
    def embedded(self) -> bool:
        return self.url.startswith("sqlite:")

    def impatient(self, client: str = "test") -> Bus:
        """A bus whose members are taken for dead soon, on the embedded adapter: what is true of seconds there is true of
        minutes elsewhere. (Kafka's limits are set in `kafka_clients`.)"""
        bus = (
            SqliteBus(self.url.removeprefix("sqlite:"), client=client, lease_s=1.0)
            if self.embedded
            else self.open(client)
        )
        self.opened.append(bus)
        return bus

    def steadfast(self, client: str) -> Bus:
        """A bus whose members are not taken for dead while a busy machine pauses. (Kafka's limit is set in `kafka_clients`.)"""
        if not self.embedded:
            return self.open(client)
        bus = SqliteBus(self.url.removeprefix("sqlite:"), client=client, lease_s=60.0)
        self.opened.append(bus)
        return bus

    async def foreign(self, bus: Bus, key: str, data: bytes, headers: dict[str, bytes | None]) -> None:
        """What another program wrote, with headers as no publisher of ours writes them. The embedded log has no other
        programs: there it is the nearest that the bus itself takes."""
        if self.embedded:
            raw = Raw(data, {name: (value or b"").decode("utf-8", "replace") for name, value in headers.items()})
            return await bus.publish(Topic(self.topic.name, (Raw,), self.topic.partitions), key, raw)
        await bus.lag([self.topic], self.group)  # the topic is there
        cluster = Cluster.parse(self.url)
        # Compressed, as whoever writes that much does: the broker's limit is on what it is sent.
        producer = KafkaProducer(**cluster.options(), max_request_size=1 << 24, compression_type="zstd")
        try:
            part = partition_of(key, self.topic.partitions)
            with null_headers():
                sent = producer.send(
                    cluster.physical(self.topic.name),
                    value=data,
                    key=key.encode(),
                    headers=[(name, NULL if value is None else value) for name, value in headers.items()],
                    partition=part,
                )
            await asyncio.to_thread(sent.get, timeout=patient(30))
        finally:
            await asyncio.to_thread(producer.close)

    @contextlib.asynccontextmanager
    async def away(self, *, frozen: bool = False) -> AsyncIterator[None]:
        """The log cannot be used meanwhile: the broker is killed (and started again afterwards) or stands still, or somebody
        holds the file's write lock."""
        if self.embedded:
            with contextlib.closing(sqlite3.connect(self.url.removeprefix("sqlite:"), isolation_level=None)) as other:
                other.execute("PRAGMA busy_timeout = 20000")
                other.execute("BEGIN IMMEDIATE")
                yield
                other.execute("ROLLBACK")
            return
        process = servers.read(self.servers)["kafka"].process
        assert process is not None
        if frozen:
            await asyncio.to_thread(stand_still, process)
        else:
            process.kill()
            await asyncio.to_thread(process.wait, 20)
        try:
            yield
        finally:
            if frozen:
                process.send_signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(fleet.up, ["kafka"], self.servers)

    def member(self, group: str, mode: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(MEMBER), self.url, self.topic.name, group, mode],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.members.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process


@pytest.fixture(params=["sqlite", "kafka"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    if request.param == "kafka":
        url = need("ETUDE_BUS")["ETUDE_BUS"]
    else:
        url = f"sqlite:{tmp_path / 'bus.db'}"
    return World(url, Topic(f"test.{uuid.uuid4().hex[:12]}", (Alert,), partitions=8), [])


async def freeze(process: subprocess.Popen[str], bus: Bus, items: list[tuple[Topic, str, Alert]]) -> None:
    """Stops a process: alive, silent, its lease runs out. Publishes `items` afterwards. One that is caught with the write
    lock of a bus file in its hands is let go and caught again: nobody could write before it goes on."""
    while True:
        await asyncio.to_thread(stand_still, process)
        try:
            return await bus.publish_many(items)
        except BusUnavailable:
            process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.1)


@pytest.fixture
def go(world: World) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs a test's coroutine; what it opened is closed afterwards, in the same loop."""

    def run(scenario: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await scenario()
            finally:
                for process in world.members:
                    process.kill()  # one that a failed test left behind, frozen perhaps
                for bus in world.opened:
                    await bus.close()

        asyncio.run(bounded())

    return run


async def take(deliveries: AsyncIterator[Delivery], count: int) -> list[Delivery]:
    return [await anext(deliveries) for _ in range(count)]


async def nothing_comes(deliveries: AsyncIterator[Delivery], seconds: float = 0.4) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await anext(deliveries)
    except TimeoutError:
        return True
    return False


def texts(deliveries: list[Delivery]) -> list[str]:
    return [delivery.message.what for delivery in deliveries]


async def drained(bus: Bus, topic: Topic, group: str, deliveries: AsyncIterator[Delivery] | None = None) -> None:
    """Waits until the group has acknowledged all. With `deliveries`, what comes again (its answer was lost with a
    connection) is answered meanwhile."""

    async def answer(deliveries: AsyncIterator[Delivery]) -> None:
        async for delivery in deliveries:
            delivery.done()

    answering = asyncio.create_task(answer(deliveries)) if deliveries else None
    while True:
        with contextlib.suppress(BusUnavailable):  # the group waits for a member, or a broker has just come back
            if await bus.lag([topic], group) == {topic.name: 0}:
                break
        await asyncio.sleep(0.05)
    if answering:
        assert not answering.done()
        answering.cancel()
