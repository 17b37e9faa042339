"""Kafka: our adapter against a loop around kafka-python with the same settings."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError

from benchmarks.buses import kill, message, topic, unread
from shared.bus import Bus, BusUnavailable, connect
from shared.bus.assignment import partition_of
from shared.bus.kafka_clients import FETCH_MS
from shared.bus.kafka_cluster import Cluster
from shared.bus.kafka_reader import COMMIT_EVERY_S, POLL_MS
from shared.contracts import codec
from shared.contracts.topics import Topic

CHUNK = 256  # messages that are published together
CHUNKS_IN_FLIGHT = 8  # as of several tasks of one service
PACE_S = 0.01  # between two messages whose latency is measured
WITHIN_S = 120.0


def new_topic(url: str) -> Topic:
    """Made as ours are made."""
    fresh = topic(f"bench.{uuid.uuid4().hex[:8]}")

    async def make() -> None:
        bus = connect(url, client="bench")
        try:
            await bus.publish(fresh, "first", message(1024))
        finally:
            await bus.close()

    asyncio.run(make())
    return fresh


def _producer(url: str) -> KafkaProducer:
    return KafkaProducer(
        **Cluster.parse(url).options(),
        acks="all",
        enable_idempotence=True,
        compression_type="zstd",
        linger_ms=2,
        allow_auto_create_topics=False,
    )


def raw_produce(url: str, count: int, size: int) -> float:
    """Messages a second from the first call until all are durable."""
    to = new_topic(url)
    data, headers = codec.encode(to, message(size))
    sent_headers = [(name, value.encode()) for name, value in headers.items()]
    producer = _producer(url)
    try:
        start = time.perf_counter()
        for i in range(count):
            key = str(i)
            where = partition_of(key, to.partitions)
            producer.send(to.name, value=data, key=key.encode(), headers=sent_headers, partition=where)
        producer.flush(WITHIN_S)
        return count / (time.perf_counter() - start)
    finally:
        producer.close()


async def fill(bus: Bus, to: Topic, count: int, size: int) -> float:
    """The same by our adapter: messages a second."""
    what = message(size)
    waiting = iter(range(0, count, CHUNK))

    async def some() -> None:
        for first in waiting:
            await bus.publish_many([(to, str(i), what) for i in range(first, min(count, first + CHUNK))])

    start = time.perf_counter()
    await asyncio.gather(*[some() for _ in range(CHUNKS_IN_FLIGHT)])
    return count / (time.perf_counter() - start)


def produce(url: str, count: int, size: int) -> float:
    to = new_topic(url)

    async def run() -> float:
        bus = connect(url, client="bench")
        try:
            await bus.publish(to, "open", message(size))  # the connection is no part of it, as in the other loop
            return await fill(bus, to, count, size)
        finally:
            await bus.close()

    return asyncio.run(run())


def filled(url: str, count: int, size: int) -> Topic:
    to = new_topic(url)

    async def run() -> None:
        bus = connect(url, client="bench")
        try:
            await fill(bus, to, count, size)
        finally:
            await bus.close()

    asyncio.run(run())
    return to


def _consumer(url: str, group: str | None) -> KafkaConsumer:
    return KafkaConsumer(
        **Cluster.parse(url).options(),
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        allow_auto_create_topics=False,
        fetch_max_wait_ms=FETCH_MS,
    )


def _records(consumer: KafkaConsumer, count: int) -> Iterator[bytes]:
    deadline = time.monotonic() + WITHIN_S
    while count > 0:
        for records in consumer.poll(timeout_ms=POLL_MS).values():
            for record in records:
                count -= 1
                yield record.value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} messages are missing after {WITHIN_S:.0f} s")


def raw_consume(url: str, count: int, size: int) -> float:
    """Messages a second from the first one to all read and committed, ten commits a second."""
    to = filled(url, count, size)
    consumer = _consumer(url, f"g.{uuid.uuid4().hex[:8]}")
    try:
        consumer.subscribe([to.name])
        records, next_commit = _records(consumer, count), 0.0
        next(records)
        start = time.perf_counter()
        for _ in records:
            if time.perf_counter() > next_commit:
                consumer.commit()
                next_commit = time.perf_counter() + COMMIT_EVERY_S
        consumer.commit()
        return (count - 1) / (time.perf_counter() - start)
    finally:
        consumer.close(autocommit=False)


def consume(url: str, count: int, size: int) -> float:
    """The same by our adapter, every message decoded and acknowledged by itself."""
    to, group = filled(url, count, size), f"g.{uuid.uuid4().hex[:8]}"

    async def run() -> float:
        bus = connect(url, client="bench")
        try:
            deliveries = bus.deliveries([to], group, 256)
            (await anext(deliveries)).done()
            start = time.perf_counter()
            for _ in range(count - 1):
                (await anext(deliveries)).done()
            await bus.lag([to], group)  # returns when all is committed
            return (count - 1) / (time.perf_counter() - start)
        finally:
            await bus.close()

    return asyncio.run(run())


def raw_latencies(url: str, count: int) -> list[float]:
    """Milliseconds from the call of `send` to the record in hand, one message at a time."""
    to = new_topic(url)
    consumer, producer = _consumer(url, None), _producer(url)
    arrivals: list[tuple[float, float]] = []
    try:
        consumer.assign([TopicPartition(to.name, p) for p in range(to.partitions)])
        consumer.seek_to_beginning()
        list(_records(consumer, 1))

        def read() -> None:
            arrivals.extend((time.perf_counter(), float(value)) for value in _records(consumer, count))

        reading = threading.Thread(target=read)
        reading.start()
        for i in range(count):
            time.sleep(PACE_S)
            key = str(i)
            producer.send(
                to.name,
                value=str(time.perf_counter()).encode(),
                key=key.encode(),
                partition=partition_of(key, to.partitions),
            )
        reading.join(WITHIN_S)
    finally:
        producer.close()
        consumer.close(autocommit=False)
    return [(arrived - sent) * 1000 for arrived, sent in arrivals]


def latencies(url: str, count: int) -> list[float]:
    """The same by our adapter: from the call of `publish` to the delivery in hand."""
    to = new_topic(url)
    template = message(1024)

    async def run() -> list[float]:
        bus = connect(url, client="bench")
        found = []
        try:
            deliveries = bus.deliveries([to], f"g.{uuid.uuid4().hex[:8]}", 64)
            (await anext(deliveries)).done()
            kind = type(template)

            async def publish() -> None:
                for i in range(count):
                    await asyncio.sleep(PACE_S)
                    sent = kind(run="r", name="n", severity="info", what=str(time.perf_counter()))
                    await bus.publish(to, str(i), sent)

            publishing = asyncio.create_task(publish())
            for _ in range(count):
                delivery = await anext(deliveries)
                found.append((time.perf_counter() - float(delivery.message.what)) * 1000)
                delivery.done()
            await publishing
        finally:
            await bus.close()
        return found

    return asyncio.run(run())


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def lost_at_kill(folder: Path, url: str, count: int) -> int:
    """Of the messages whose publish returned, those that are gone after kill -9 of the broker in the middle."""
    to = new_topic(url)

    async def run() -> int:
        bus = connect(url, client="bench")
        durable: set[str] = set()

        async def publish() -> None:
            for i in range(count):
                try:
                    await bus.publish(to, str(i), type(message(1024))(run="r", name="n", severity="info", what=str(i)))
                    durable.add(str(i))
                except (BusUnavailable, KafkaError):
                    continue

        try:
            publishing = asyncio.create_task(publish())
            while len(durable) < count // 2 and not publishing.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.to_thread(kill, folder, "kafka")
            await publishing
            return len(await unread(bus, to, f"g.{uuid.uuid4().hex[:8]}", durable, WITHIN_S))
        finally:
            await bus.close()

    return asyncio.run(run())
