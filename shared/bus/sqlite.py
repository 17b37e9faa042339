"""The embedded bus: a durable log in one SQLite file, shared by all processes of a machine, with Kafka's semantics.

Invariants
- All SQL runs in one thread per process (`sqlite_worker`), never on the event loop. Publishes that wait when the thread looks
  become durable in one transaction (group commit).
- A group's partition has one owner at a time. Owners heartbeat; a dead member's partitions move when its lease is over,
  at once if its process on this host is gone. Commits are fenced by ownership.
- A rebalance drains: a partition that moves is given no new deliveries, and changes hands when what is in flight is
  settled, or after some seconds (`sqlite_members`).
- A group that never read a topic starts at its beginning.

How far it reaches: any number of processes on one machine, a few thousand messages a second, one file. The file
must lie on a local disk (SQLite's WAL needs shared memory). Delays asked for by `retry` live in the consumer: after its
death the message comes again at once.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared import storable, telemetry_spans
from shared.bus import BusUnavailable, Standing
from shared.bus.assignment import partition_of
from shared.bus.inbox import Deliveries, Inbox
from shared.bus.sqlite_store import Row, Store
from shared.bus.sqlite_worker import Worker
from shared.contracts import codec
from shared.contracts.topics import Topic
from shared.settings import path_and_options


class SqliteBus:
    """See shared.bus.Bus. One object per process serves any number of `deliveries()`."""

    def __init__(
        self,
        path: str | Path,
        *,
        client: str,
        fsync: bool = False,
        lease_s: float = 5.0,
        keep_acknowledged_s: float = 3600.0,
    ) -> None:
        """`fsync` (or `?synchronous=full` after the path): a publish survives a power loss, at a disk flush each."""
        name, options = path_and_options(str(path))
        if options not in ("", "synchronous=full", "synchronous=normal"):
            raise ValueError(f"bus: option {options!r}; allowed: synchronous=full, synchronous=normal")
        try:
            store = Store(Path(name), fsync=fsync or options == "synchronous=full")
        except (OSError, sqlite3.Error) as error:
            raise BusUnavailable(f"bus file {name}: {error}") from None
        self._worker = Worker(store, client, lease_s, keep_acknowledged_s)

    async def publish(self, topic: Topic, key: str, message: msgspec.Struct) -> None:
        await self.publish_many([(topic, key, message)])

    async def publish_many(self, items: Sequence[tuple[Topic, str, msgspec.Struct]]) -> None:
        rows = []
        with telemetry_spans.sending() as sending:
            for topic, key, message in items:
                key = storable.encodable(key)  # as the message says it
                data, headers = codec.encode(topic, message)
                sending.message(topic, key, message, data, headers)
                rows.append(Row(topic.name, partition_of(key, topic.partitions), key, data, json.dumps(headers)))
            if rows:
                await asyncio.wrap_future(self._worker.append(rows))

    def deliveries(self, topics: Sequence[Topic], group: str | None, max_in_flight: int) -> Deliveries:
        inbox = Inbox(max_in_flight, self._worker.wake, group)
        self._worker.subscribe(topics, group, inbox)
        return Deliveries(inbox)

    async def lag(self, topics: Sequence[Topic], group: str) -> dict[str, int]:
        names = [topic.name for topic in topics]
        return await asyncio.wrap_future(
            self._worker.call(lambda store: {name: store.lag(group, name) for name in names})
        )

    async def standing(self, topics: Sequence[Topic], group: str) -> dict[tuple[str, int], Standing]:
        names = [topic.name for topic in topics]
        return await asyncio.wrap_future(
            self._worker.call(
                lambda store: {at: one for name in names for at, one in store.standing(group, name).items()}
            )
        )

    async def ping(self) -> None:
        await asyncio.wrap_future(self._worker.append([]))  # of nothing: the file's lock is taken and let go

    async def purge(self) -> int:
        """Deletes what nobody needs any more, now instead of at the next turn; returns how many messages."""
        return await asyncio.wrap_future(self._worker.call(self._worker.purge))

    async def close(self) -> None:
        """Writes what was published and settled, leaves every group, ends the iterators."""
        await asyncio.to_thread(self._worker.stop)
