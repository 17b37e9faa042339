"""The bus: the embedded one, Kafka by our adapter against a loop around kafka-python, and what peers use instead.

Messages a second, what a message costs to be durable, latency, cost when idle, and what is lost at kill -9. Kafka and Redis
are private ones (infra.servers); where they cannot be had their rows are left out, and it says why.

python -m benchmarks.bus [--quick] [--json FILE] [--only embedded|kafka|peers|path]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from benchmarks.buses import SIZES, private, unread
from benchmarks.records import Bench, record
from infra.servers import Unavailable, only_what_is_here
from shared.bus import Bus, connect
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic

TOPIC = Topic("bench", (Alert,), partitions=64)
MESSAGE = Alert(
    run="r-20260101T000000-0000", name="bench", severity="info", what="w" * 400
)  # as large as a RolloutScored
CONCURRENT = 64  # publishers that wait for durability at the same time, as in a busy rollout worker


@contextmanager
def log(options: str = "") -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite:{Path(folder) / 'bus.db'}{options}"


async def publish(bus: Bus, count: int, concurrent: int) -> float:
    """Messages a second when `concurrent` tasks publish one after the other."""

    async def one(first: int) -> None:
        for i in range(first, count, concurrent):
            await bus.publish(TOPIC, str(i), MESSAGE)

    start = time.perf_counter()
    await asyncio.gather(*[one(first) for first in range(concurrent)])
    return count / (time.perf_counter() - start)


async def consume(bus: Bus, count: int) -> float:
    """Messages a second from the log to acknowledged and committed."""
    start = time.perf_counter()
    deliveries = bus.deliveries([TOPIC], "g", 64)
    for _ in range(count):
        (await anext(deliveries)).done()
    assert await bus.lag([TOPIC], "g") == {TOPIC.name: 0}
    return count / (time.perf_counter() - start)


def on_one_bus(scenario: Callable[[Bus], Awaitable[float]], options: str = "") -> float:
    with log(options) as url:
        return asyncio.run(with_bus(url, scenario))


async def with_bus(url: str, scenario: Callable[[Bus], Awaitable[float]]) -> float:
    bus = connect(url, client="bench")
    try:
        return await scenario(bus)
    finally:
        await bus.close()


def _publisher(url: str, count: int, pace_s: float) -> None:
    async def run() -> None:
        bus = connect(url, client="publisher")
        if pace_s:
            for i in range(count):
                await asyncio.sleep(pace_s)
                await bus.publish(TOPIC, str(i), Alert(run="r", name="n", severity="info", what=str(time.time())))
        else:
            await publish(bus, count, CONCURRENT)
        await bus.close()

    asyncio.run(run())


def across_processes(url: str, publishers: int, count: int, pace_s: float) -> list[tuple[float, float]]:
    """(arrival, text of the message) of `publishers` processes' messages, read with acknowledgement in this one."""

    async def run() -> list[tuple[float, float]]:
        bus = connect(url, client="bench")
        deliveries = bus.deliveries([TOPIC], "g", 256)
        arrivals = []
        for _ in range(publishers * count):
            delivery = await anext(deliveries)
            arrivals.append((time.time(), float(delivery.message.what) if pace_s else 0.0))
            delivery.done()
        await bus.close()
        return arrivals

    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_publisher, args=(url, count, pace_s)) for _ in range(publishers)]
    for process in processes:
        process.start()
    arrivals = asyncio.run(run())
    for process in processes:
        process.join()
    return arrivals


def through_three_processes(count: int) -> float:
    """Messages a second from two publishing processes through one consuming one, first to last arrival."""
    with log() as url:
        arrivals = across_processes(url, 2, count // 2, 0.0)
    return len(arrivals) / (arrivals[-1][0] - arrivals[0][0])


def latencies(count: int) -> list[float]:
    """Milliseconds from the publisher's clock to the consumer's hand, at 50 messages a second."""
    with log() as url:
        return [(arrived - sent) * 1000 for arrived, sent in across_processes(url, 1, count, 0.02)]


async def idle_share(bus: Bus, after_s: float, seconds: float) -> float:
    """Per cent of a core that a bus with four subscriptions takes when nothing comes, from `after_s` after their start: on
    Kafka they join their groups first."""
    topics = [Topic(f"idle{i}", (Alert,)) for i in range(4)]
    subscriptions = [bus.deliveries([topic], "g", 64) for topic in topics]
    await asyncio.sleep(after_s)
    cpu, wall = time.process_time(), time.perf_counter()
    await asyncio.sleep(seconds)
    share = 100 * (time.process_time() - cpu) / (time.perf_counter() - wall)
    del subscriptions
    return share


def embedded(bench: Bench) -> None:
    count = bench.pick(20_000, 4_000)
    goal = "2,000 messages/s, the goal"
    bench.measure(
        "bus.sqlite.publish",
        f"publish, durable on return, {CONCURRENT} at a time",
        "messages/s",
        lambda: on_one_bus(lambda bus: publish(bus, count, CONCURRENT)),
        against=goal,
    )
    bench.measure(
        "bus.sqlite.publish_alone",
        "publish, one at a time",
        "messages/s",
        lambda: on_one_bus(lambda bus: publish(bus, count // 8, 1)),
    )
    bench.measure(
        "bus.sqlite.publish_fsync",
        f"publish with synchronous=full, {CONCURRENT} at a time",
        "messages/s",
        lambda: on_one_bus(lambda bus: publish(bus, count // 4, CONCURRENT), "?synchronous=full"),
        against="bus.sqlite.publish",
    )

    async def publish_then_consume(bus: Bus) -> float:
        for first in range(0, count, 500):
            await bus.publish_many([(TOPIC, str(i), MESSAGE) for i in range(first, first + 500)])
        return await consume(bus, count)

    bench.measure(
        "bus.sqlite.consume",
        "consume, acknowledged and committed",
        "messages/s",
        lambda: on_one_bus(publish_then_consume),
        against=goal,
    )
    bench.measure(
        "bus.sqlite.three_processes",
        "two publishing processes, one consuming with acknowledgement",
        "messages/s",
        lambda: through_three_processes(count),
        against=goal,
    )
    delays = latencies(bench.pick(500, 100))
    bench.add(
        record("bus.sqlite.latency", "between processes at 50 messages/s, median", [statistics.median(delays)], "ms")
    )
    bench.add(
        record("bus.sqlite.latency_p99", "the same, 99th percentile", [statistics.quantiles(delays, n=100)[98]], "ms")
    )
    bench.measure(
        "bus.sqlite.idle",
        "idle, four subscriptions of 64 partitions",
        "% of a core",
        lambda: on_one_bus(lambda bus: idle_share(bus, 1.0, bench.pick(5.0, 2.0))),
        against="1 %, the goal",
        repeats=3,
    )
    bench.measure(
        "bus.sqlite.lost_at_kill",
        "published and gone after kill -9 of the publisher",
        "messages",
        lambda: lost_at_kill(bench.pick(4_000, 800)),
        against="0, the promise",
        repeats=3,
    )


def lost_at_kill(count: int) -> float:
    """Of the messages whose publish returned, those that another process does not find."""
    context = multiprocessing.get_context("spawn")
    with log() as url:
        told = context.SimpleQueue()
        publisher = context.Process(target=_tell_what_is_durable, args=(url, told))
        publisher.start()
        durable = 0
        while durable < count:
            durable = told.get()
        os.kill(publisher.pid or 0, signal.SIGKILL)
        publisher.join()

        async def missing() -> float:
            bus = connect(url, client="bench")
            try:
                return float(len(await unread(bus, TOPIC, "g", {str(i) for i in range(durable)}, 60)))
            finally:
                await bus.close()

        return asyncio.run(missing())


def _tell_what_is_durable(url: str, told: SimpleQueue[int]) -> None:
    async def run() -> None:
        bus = connect(url, client="publisher")
        done = 0
        while True:
            batch = [
                (TOPIC, str(i), Alert(run="r", name="n", severity="info", what=str(i))) for i in range(done, done + 50)
            ]
            await bus.publish_many(batch)
            done += 50
            told.put(done)

    asyncio.run(run())


def kafka(bench: Bench) -> None:
    from benchmarks.buses import kafka as by

    with private("kafka") as (folder, settings):
        url = settings["ETUDE_BUS"]
        for name, size in SIZES.items():
            count = bench.pick(60_000 if size < 4096 else 15_000, 15_000 if size < 4096 else 4_000)
            for what, ours, raw, goal in (
                ("produce", by.produce, by.raw_produce, "0.9, the goal"),
                ("consume", by.consume, by.raw_consume, "0.6, the goal"),
            ):
                pairs = []
                for i in range(bench.pick(9 if size < 4096 else 5, 2)):  # in turn, and each goes first as often
                    sides = (raw, ours) if i % 2 else (ours, raw)
                    rate = {side: side(url, count, size) for side in sides}
                    pairs.append((rate[ours], rate[raw]))
                suffix = "" if size == 1024 else f"_{name}"
                own, hand = [a for a, _ in pairs], [b for _, b in pairs]
                bench.add(
                    record(f"bus.kafka.{what}_{name}", f"our adapter, {what}, {name} messages", own, "messages/s")
                )
                bench.add(record(f"bus.raw.{what}_{name}", f"raw kafka-python, {what}, {name}", hand, "messages/s"))
                ratios = [a / b for a, b in pairs]
                bench.add(record(f"bus.{what}_vs_raw{suffix}", f"ours / raw, {what}, {name}", ratios, "ratio", goal))
        count = bench.pick(2_000, 200)
        raw, ours = by.raw_latencies(url, count), by.latencies(url, count)
        bench.add(record("bus.kafka.latency", "publish to delivery, median", [statistics.median(ours)], "ms"))
        bench.add(record("bus.kafka.latency_p99", "the same, 99th percentile", [by.p99(ours)], "ms"))
        bench.add(record("bus.raw.latency_p99", "raw kafka-python, 99th percentile", [by.p99(raw)], "ms"))
        added = by.p99(ours) - by.p99(raw)
        bench.add(record("bus.added_p99", "ours minus raw, 99th percentile", [added], "ms", "5 ms, the goal"))
        bench.measure(
            "bus.kafka.idle",
            "idle, four subscriptions of 64 partitions",
            "% of a core",
            lambda: asyncio.run(with_bus(url, lambda bus: idle_share(bus, 15.0, bench.pick(20.0, 5.0)))),
            against="bus.sqlite.idle",
            repeats=3,
        )
        lost = by.lost_at_kill(folder, url, bench.pick(4_000, 400))
        bench.add(
            record("bus.kafka.lost_at_kill", "published and gone after kill -9 of the broker", [lost], "messages", "0")
        )


def peers(bench: Bench) -> None:
    from benchmarks.buses import peers as by

    with private("redis") as (folder, settings):
        url = settings["ETUDE_JOBS"]
        for name, size in SIZES.items():
            count = bench.pick(60_000 if size < 4096 else 15_000, 2_000)
            for what, run in (("produce", by.redis_produce), ("consume", by.redis_consume)):
                bench.measure(
                    f"bus.redis_stream.{what}_{name}",
                    f"Redis stream, {what}, {name}, 256 a round trip",
                    "messages/s",
                    lambda run=run, count=count, size=size: run(url, count, size),  # type: ignore[misc]
                    against=f"bus.kafka.{what}_{name}",
                )
        count = bench.pick(4_000, 400)
        for id, what, append_only in (
            ("redis_stream_aof", "with its append-only file", True),
            ("redis_stream", "as it comes out of its box", False),
        ):
            lost = by.redis_lost_at_kill(folder, url, count, append_only=append_only)
            words = f"Redis stream {what}: answered and gone after kill -9 of the server, of {count}"
            bench.add(record(f"bus.{id}.lost_at_kill", words, [lost], "messages", "bus.kafka.lost_at_kill"))
    if not by.has_zmq():
        print("the ZMQ pipe is left out: pyzmq is not installed (make setup)", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder_:
        for name, size in SIZES.items():
            count = bench.pick(200_000 if size < 4096 else 40_000, 5_000)
            bench.measure(
                f"bus.zmq.pipe_{name}",
                f"ZMQ PUSH/PULL, {name}, nothing durable or acknowledged",
                "messages/s",
                lambda count=count, size=size: by.zmq_pipe(f"ipc://{folder_}/pipe", count, size),  # type: ignore[misc]
                against=f"bus.kafka.consume_{name}",
            )
        count = bench.pick(4_000, 400)
        lost = by.zmq_lost_at_kill(f"ipc://{folder_}/kill", count)
        words = f"ZMQ pipe: sent and gone after kill -9 of the reader, of {count}"
        bench.add(record("bus.zmq.lost_at_kill", words, [lost], "messages", "bus.sqlite.lost_at_kill"))


def path(bench: Bench) -> None:
    """Through scheduler and ledger: embedded, then on servers."""
    from benchmarks.buses import path as by

    attempts = bench.pick(2_000, 100)

    def measure(name: str, words: str, variables: dict[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            values = by.milliseconds(Path(folder), variables, attempts)
        what = f"requested to trained without work, {words}"
        bench.add(record(f"bus.path.{name}_p50", f"{what}, median", [statistics.median(values)], "ms"))
        bench.add(
            record(f"bus.path.{name}_p99", f"{what}, 99th percentile", [statistics.quantiles(values, n=100)[98]], "ms")
        )

    measure("embedded", "embedded", {})
    with private("kafka", "postgres", "minio", "redis") as (_, settings):
        measure("servers", "Kafka, PostgreSQL, MinIO", settings)


def main() -> None:
    parts = {part.__name__: part for part in (embedded, kafka, peers, path)}
    bench = Bench.start(__doc__, parts=list(parts))
    with only_what_is_here() if bench.quick else nullcontext():
        for name, part in parts.items():
            try:
                if bench.wants(name):
                    part(bench)
            except Unavailable as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
    bench.end()


if __name__ == "__main__":
    main()
