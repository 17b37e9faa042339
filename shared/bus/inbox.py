"""Between an adapter's I/O thread and the consumer's event loop: read ahead, limit what is in flight, collect answers.

One `Inbox` per `deliveries()` call. The I/O thread offers what it has read and drains what was settled; the event loop
takes. `max_in_flight` bounds what was taken and not settled. A delivery that waits for its retry gives its place free.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import structlog

from shared import telemetry_spans
from shared.bus import BusUnavailable, metrics
from shared.bus.tracking import OffsetTracker, write_ranges
from shared.contracts.topics import Topic

NOTED_CHARS = 4000  # of what is finished beyond a position: a Kafka broker takes 4,096 bytes unless told otherwise
READ_AHEAD = 256  # messages read before they are asked for, at most; each has up to 64 KiB
PARKED_MAX = (
    1024  # deliveries waiting for their retry; above it nothing new is read, or a poison flood would fill memory
)
KEY_SHOWN = 200  # characters in a log line

log = structlog.get_logger()


class Lease:
    """One partition (or, for a broadcast reader, one topic: `partition` -1) held by one inbox, from assignment to loss.

    `live` ends once: what is settled afterwards concerns a lease that somebody else holds now, and is ignored.
    """

    __slots__ = ("committed", "in_flight", "live", "noted", "partition", "read", "revoke_by", "topic", "tracker")

    def __init__(self, topic: Topic, partition: int, position: int, finished: Iterable[int] = ()) -> None:
        """`finished`: offsets beyond `position` that an earlier owner settled."""
        self.topic = topic
        self.partition = partition
        self.tracker = OffsetTracker(position, finished)
        self.read = position  # the next offset to read
        self.committed = position  # what the log knows
        self.noted = ""  # what the log knows of those finished beyond
        self.in_flight = 0  # taken and not settled; changed under the inbox's lock only
        self.revoke_by: float | None = None  # being handed back: nothing new is read; monotonic time of the end
        self.live = True

    def standing(self) -> tuple[int, str]:
        """What the log should know now: `committed` and `noted`."""
        position = self.tracker.position
        return position, write_ranges(position, self.tracker.finished(), NOTED_CHARS)


class Received:
    """A delivery (shared.bus.Delivery). Its methods may be called from any thread; only the first call counts."""

    __slots__ = ("_inbox", "data", "headers", "key", "lease", "message", "offset", "taken", "taken_ns", "topic")

    def __init__(
        self, inbox: Inbox, lease: Lease, key: str, message: Any, headers: dict[str, str], offset: int, data: bytes
    ) -> None:
        self.topic = lease.topic
        self.key = key
        self.message = message
        self.headers = headers
        self.offset = offset
        self.data = data
        self.lease = lease
        self.taken = False  # with the consumer now; under the inbox's lock
        self.taken_ns = 0  # Unix time of that
        self._inbox = inbox

    def done(self) -> None:
        self._inbox.settle(self, None)

    def retry(self, after_s: float) -> None:
        self._inbox.park(self, after_s)

    def bury(self, reason: str) -> None:
        self._inbox.settle(self, reason)

    def __repr__(self) -> str:
        return f"<{self.topic.name}/{self.lease.partition}@{self.offset} {self.key!r} {type(self.message).__name__}>"


class Inbox:
    def __init__(self, max_in_flight: int, wake: Callable[[], None], group: str | None = None) -> None:
        """`wake` asks the I/O thread for a look: there is room, or somebody closed. `group` is for the metrics."""
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight: found {max_in_flight}, allowed: at least 1")
        self.max_in_flight = max_in_flight
        self.group = group
        self.capacity = min(max(max_in_flight, 16), READ_AHEAD)
        self.failure: BaseException | None = None
        self.closed = False
        self.abandoned = False  # the iterator is gone; the I/O thread closes the inbox
        self._wake = wake
        self._lock = threading.Lock()
        self._ready: deque[Received] = deque()
        self._parked: list[tuple[float, int, Received]] = []  # heap by due time (monotonic)
        self._settled: list[tuple[Received, str | None]] = []
        self._in_flight = 0
        self._since: dict[Received, float] = {}  # in flight -> when it was taken (monotonic), oldest first
        self._short = False  # the I/O thread stopped reading for want of room; there may be more
        self._order = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._waiting = 0
        self._offered, self._handed_out = 0, 0
        self._past: int | None = None  # so many offered are what was there at the subscription; None: not read yet
        self._caught_up: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []  # of those who wait for it
        metrics.watch(self, group)

    # The I/O thread's side.

    def room(self) -> int:
        """How many more may be offered now."""
        with self._lock:
            if self.closed or len(self._parked) >= PARKED_MAX:
                return 0
            left = self.capacity - len(self._ready)
            self._short = left <= 0
            return left

    def offer(self, items: list[Received]) -> None:
        with self._lock:
            self._ready.extend(items)
            self._offered += len(items)
            self._short = len(self._ready) >= self.capacity
            self._notify()

    def past_read(self) -> None:
        """All that was in the log at the subscription has been offered. Only the first call counts."""
        with self._lock:
            if self._past is None:
                self._past = self._offered
                self._tell()

    def past_again(self) -> bool:
        """The log will be offered from its beginning once more, by a reader that broke: what was handed out of it before
        says nothing about how far the past is read. False: all of it was read."""
        with self._lock:
            if self._is_caught_up():
                return False
            self._past, self._offered, self._handed_out = None, 0, 0
            return True

    @property
    def settled(self) -> bool:
        """Whether `drain` would return something."""
        return bool(self._settled)

    def drain(self) -> list[tuple[Received, str | None]]:
        """What was settled since the last call: (delivery, None) is done, (delivery, reason) is to be buried: in
        a group only."""
        with self._lock:
            settled, self._settled = self._settled, []
        if self.group is None:
            for item, reason in settled:
                if reason is not None:
                    self.skip(item, reason)
            return [(item, None) for item, _ in settled]
        for topic, items in _by_topic([item for item, _ in settled]).items():
            metrics.meter(topic, self.group).taken(items)
        self._count("done", [item for item, reason in settled if reason is None])
        return settled

    def skip(self, item: Received, reason: str) -> None:
        """Instead of a dead letter, where there is no group: every such reader would write one, and again at every start."""
        log.warning("bus.skipped", topic=item.topic.name, offset=item.offset, key=item.key[:KEY_SHOWN], reason=reason)

    def buried(self, items: Iterable[Received]) -> None:
        """Their dead letters are durable: what a consumer buried, and what none could be given since it is unreadable."""
        self._count("buried", items)

    def _count(self, answer: str, items: Iterable[Received]) -> None:
        for topic, some in _by_topic(items).items():
            metrics.meter(topic, self.group).answered(answer, len(some))

    def withdraw(self, lease: Lease) -> int:
        """Forgets what was read of `lease` and nobody has taken. Returns how many of it are in flight."""
        with self._lock:
            if any(item.lease is lease for item in self._ready):
                self._ready = deque(item for item in self._ready if item.lease is not lease)
            if any(item.lease is lease for _, _, item in self._parked):
                self._parked = [entry for entry in self._parked if entry[2].lease is not lease]
                heapq.heapify(self._parked)
            return lease.in_flight

    def close(self, failure: BaseException | None = None) -> None:
        """No more deliveries: takers get None, or `failure` is raised to them. What is in flight can be settled."""
        with self._lock:
            self.closed = True
            self.failure = self.failure or failure
            self._ready.clear()
            self._parked.clear()
            self._notify()
            self._tell()
        self._wake()

    def abandon(self) -> None:
        """Nobody iterates any more. Takes no lock: the garbage collector may call it anywhere."""
        if not self.closed:
            self.abandoned = True
            self._wake()

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def oldest_s(self) -> float:
        """How long the delivery that was taken first of those in flight is out."""
        with self._lock:
            first = next(iter(self._since.values()), None)
        return 0.0 if first is None else time.monotonic() - first

    # The consumer's side.

    async def take(self) -> Received | None:
        """The next delivery; None after `close`. A cancelled call loses nothing."""
        while True:
            with self._lock:
                if self.failure:
                    raise self.failure
                if self.closed:
                    return None
                item, due_in = self._next()
                if item is None:
                    self._loop = asyncio.get_running_loop()
                    self._event.clear()
                    self._waiting += 1
                wanted = item is not None and self._short and len(self._ready) * 2 <= self.capacity
                if wanted:
                    self._short = False
            if item is not None:
                if wanted:  # else it looks by itself; to wake it for every message would cost a look each
                    self._wake()
                item.taken_ns = time.time_ns()
                return item
            try:
                if due_in is None:
                    await self._event.wait()
                else:
                    async with asyncio.timeout(due_in):
                        await self._event.wait()
            except TimeoutError:
                pass
            finally:
                with self._lock:
                    self._waiting -= 1

    async def caught_up(self) -> None:
        """See `Deliveries`."""
        event = asyncio.Event()
        with self._lock:
            self._caught_up.append((asyncio.get_running_loop(), event))
            self._tell()
        try:
            await event.wait()
        finally:
            with self._lock:
                self._caught_up = [entry for entry in self._caught_up if entry[1] is not event]
        if not self._is_caught_up():
            raise self.failure or BusUnavailable("the bus was closed before all that it held had been read")

    def settle(self, item: Received, reason: str | None) -> None:
        with self._lock:
            if not self._give_back(item):
                return
            self._settled.append((item, reason))
        telemetry_spans.processed(item, self.group, item.taken_ns, reason)

    def park(self, item: Received, after_s: float) -> None:
        with self._lock:
            if not self._give_back(item):
                return
            if item.lease.live and item.lease.revoke_by is None and not self.closed:
                heapq.heappush(self._parked, (time.monotonic() + max(0.0, after_s), next(self._order), item))
                self._notify()
        meter = metrics.meter(item.topic.name, self.group)
        meter.taken([item])
        meter.answered("retried")

    # Under the lock.

    def _next(self) -> tuple[Received | None, float | None]:
        """(a delivery to hand out, None) or (None, seconds until a parked one is due)."""
        if self._in_flight >= self.max_in_flight:
            return None, None
        item: Received | None = None
        due_in: float | None = None
        if self._parked:
            due_in = self._parked[0][0] - time.monotonic()
            if due_in <= 0:
                item = heapq.heappop(self._parked)[2]
        if item is None and self._ready:
            item = self._ready.popleft()
            self._handed_out += 1
            self._tell()
        if item is None:
            return None, due_in
        item.taken = True
        self._in_flight += 1
        self._since[item] = time.monotonic()
        item.lease.in_flight += 1
        return item, None

    def _give_back(self, item: Received) -> bool:
        """False: it was answered before."""
        if not item.taken:
            return False
        item.taken = False
        self._in_flight -= 1
        del self._since[item]
        item.lease.in_flight -= 1
        self._notify()
        return True

    def _is_caught_up(self) -> bool:
        return self._past is not None and self._handed_out >= self._past

    def _tell(self) -> None:
        """Wakes those who wait until all is caught up, or never will be."""
        if self._caught_up and (self.closed or self._is_caught_up()):
            for loop, event in self._caught_up:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(event.set)

    def _notify(self) -> None:
        if self._waiting and self._loop:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._event.set)


def _by_topic(items: Iterable[Received]) -> dict[str, list[Received]]:
    """To count together, and not with every message."""
    found: dict[str, list[Received]] = {}
    for item in items:
        found.setdefault(item.topic.name, []).append(item)
    return found


class Deliveries(AsyncIterator[Received]):
    """What `deliveries()` returns. `aclose()`, or dropping the last reference, leaves the group: nothing new is read,
    and for a short while the adapter waits until what is in flight is settled."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def __aiter__(self) -> Deliveries:
        return self

    async def __anext__(self) -> Received:
        item = await self._inbox.take()
        if item is None:
            raise StopAsyncIteration
        return item

    async def caught_up(self) -> None:
        """Without a group only: see shared.bus.Deliveries."""
        if self._inbox.group is not None:
            raise ValueError(f"caught_up: found group {self._inbox.group!r}; allowed: who reads all, without a group")
        await self._inbox.caught_up()

    async def aclose(self) -> None:
        self._inbox.close()

    def __del__(self) -> None:
        self._inbox.abandon()
