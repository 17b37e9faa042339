"""The embedded bus: messages a second, what a message costs to be durable, latency between processes, cost when idle.

python -m benchmarks.bus [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.records import Bench, record
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
    async def run(url: str) -> float:
        bus = connect(url, client="bench")
        try:
            return await scenario(bus)
        finally:
            await bus.close()

    with log(options) as url:
        return asyncio.run(run(url))


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


def idle_share(seconds: float) -> float:
    """Per cent of a core that a bus with four subscriptions takes when nothing comes."""

    async def scenario(bus: Bus) -> float:
        topics = [Topic(f"idle{i}", (Alert,)) for i in range(4)]
        subscriptions = [bus.deliveries([topic], "g", 64) for topic in topics]
        await asyncio.sleep(1.0)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        share = 100 * (time.process_time() - cpu) / (time.perf_counter() - wall)
        del subscriptions
        return share

    return on_one_bus(scenario)


def main() -> None:
    bench = Bench.start(__doc__)
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
        lambda: idle_share(bench.pick(5.0, 2.0)),
        against="1 %, the goal",
        repeats=3,
    )
    bench.end()


if __name__ == "__main__":
    main()
