"""What `benchmarks.bus` measures beside the embedded bus: Kafka by our adapter and by hand, a Redis stream, a ZMQ pipe.

Servers are private ones, started for the measurement and removed afterwards (infra.servers).
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from infra.servers import fleet
from infra.servers import state as servers
from shared.bus import Bus
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic

SIZES = {"1k": 1024, "16k": 16 * 1024}  # bytes of a message, about
ENVELOPE = 90  # bytes that the JSON around the text takes


def topic(name: str) -> Topic:
    return Topic(name, (Alert,), partitions=64)


def message(size: int) -> Alert:
    """About `size` bytes when encoded; text that compresses as logs do, neither random nor one letter."""
    words = " ".join(f"step {i} reward {i * 37 % 101}" for i in range(size // 10))
    return Alert(run="r-20260101T000000-0000", name="bench", severity="info", what=words[: size - ENVELOPE])


@contextlib.contextmanager
def private(*names: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """(folder, settings) of servers of our own. Raises infra.servers.Unavailable."""
    with tempfile.TemporaryDirectory(prefix="etude-bench-") as base:
        folder = Path(base) / "servers"
        try:
            fleet.up(names, folder)
            yield folder, servers.settings(folder)
        finally:
            fleet.down(folder)


def kill(folder: Path, name: str) -> None:
    """kill -9, then the same server again on its data."""
    process = servers.read(folder)[name].process
    if process is not None:
        process.kill()
        process.wait(30)
    fleet.up([name], folder)


async def unread(bus: Bus, topic: Topic, group: str, wanted: set[str], within_s: float) -> set[str]:
    """Those of `wanted` that a new `group` has not been given when it has them all, or after `within_s`."""
    missing = set(wanted)
    deliveries = bus.deliveries([topic], group, 256)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while missing:
                delivery = await anext(deliveries)
                missing.discard(delivery.message.what)
                delivery.done()
    return missing
