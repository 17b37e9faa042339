"""The bus on Kafka (kafka-python), for a cluster.

Invariants
- Nothing blocks the event loop: the producer and the administration run in one executor thread, `ping` in another
  (`kafka_probe`), and every `deliveries()` has a reading thread with a consumer of its own (`kafka_reader`).
- The producer is idempotent and waits for all in-sync replicas (acks=all); `publish` returns when they have the message.
  One that failed is replaced.
- A topic that somebody deleted is made again: what is published to it meanwhile waits for that, and nothing else does.
- Topics are made as `shared.contracts.topics` declares them; one that has another number of partitions is refused, or
  keys would change their partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import structlog
from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import OffsetSpec
from kafka.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    KafkaError,
    MessageSizeTooLargeError,
    NotCoordinatorError,
    RecordListTooLargeError,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
)

from shared import storable, telemetry_spans
from shared.bus import BusUnavailable, Standing, dead_letters
from shared.bus.assignment import partition_of
from shared.bus.gone import Gone, alert_of_deleted, count
from shared.bus.gone import alert as alert_of
from shared.bus.inbox import Deliveries, Received
from shared.bus.kafka_admin import READY_WITHIN_MS, make
from shared.bus.kafka_clients import Producer, connected, end
from shared.bus.kafka_cluster import Cluster
from shared.bus.kafka_probe import Probe
from shared.bus.kafka_reader import Reader
from shared.bus.kafka_records import LEAST_LETTER_BYTES, LETTER_BYTES, letter
from shared.contracts import codec
from shared.contracts.messages import Alert
from shared.contracts.topics import ALERTS, Topic

PUBLISH_WITHIN_MS = 30_000
COORDINATOR_WITHIN_S, AGAIN_S = 15.0, 0.2  # a fresh broker's first group has no coordinator for some seconds
LOOK_EVERY_S = 1.0  # while a message is on its way: whether its topic is still there
FLUSH_WITHIN_S = 3.0  # of commits, when somebody asks for a lag: longer than any that the broker answers at once
# Messages that are handed over before the sender is woken: that is a system call, and takes the interpreter from us.
WAKE_EVERY = 64
CLOSE_WITHIN_S = 1.0  # of a producer that failed: what it still holds has failed as well

COORDINATING = (CoordinatorLoadInProgressError, CoordinatorNotAvailableError, NotCoordinatorError)
TOO_LARGE = (MessageSizeTooLargeError, RecordListTooLargeError)
UNSEEN = (UnknownTopicOrPartitionError.errno, TopicAuthorizationFailedError.errno)  # not there, or not for us
T = TypeVar("T")
log = structlog.get_logger()


class _AskAgain(BusUnavailable):
    """The broker itself says that it will know soon: it has just started, or elects."""


class _TooLarge(BusUnavailable):
    """A message is above the topic's `max.message.bytes`, or the producer's own limit."""


def _unavailable(cluster: Cluster, error: BaseException) -> BusUnavailable:
    kind = BusUnavailable
    if isinstance(error, COORDINATING):
        kind = _AskAgain
    elif isinstance(error, TOO_LARGE):
        kind = _TooLarge
    said = str(error).strip().rstrip(":")
    return kind(f"{cluster}: {type(error).__name__}{': ' if said else ''}{said}")


class KafkaBus:
    """See shared.bus.Bus."""

    def __init__(self, url: str, *, client: str) -> None:
        """Connects when it is first used. Raises ValueError for a URL that is none."""
        self.cluster = Cluster.parse(url)
        self._client = client
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"kafka-{client}")
        self._known: set[str] = set()  # topics that exist as declared; executor thread only
        self._takes: dict[str, int] = {}  # bytes of a dead letter, of topics that refused a larger one
        self._producer: Producer | None = None
        self._producer_failed = False
        self._admin: KafkaAdminClient | None = None
        self._probe = Probe(self.cluster, client)
        self._readers: list[Reader] = []
        self._closed = False

    async def publish(self, topic: Topic, key: str, message: msgspec.Struct) -> None:
        await self.publish_many([(topic, key, message)])

    async def publish_many(self, items: Sequence[tuple[Topic, str, msgspec.Struct]]) -> None:
        with telemetry_spans.sending() as sending:
            encoded = []
            for topic, key, message in items:
                key = storable.encodable(key)  # as the message says it
                data, headers = codec.encode(topic, message)
                sending.message(topic, key, message, data, headers)
                encoded.append((topic, key, data, headers))
            if encoded:
                await self._durable(await self._in_thread(lambda: self.send(encoded)), [item[0] for item in encoded])

    async def _durable(self, sent: Future[None], topics: Sequence[Topic]) -> None:
        """Wait until `send` is done; make their topics again meanwhile, should somebody have deleted them."""
        done = asyncio.wrap_future(sent)
        try:
            while not (await asyncio.wait([done], timeout=LOOK_EVERY_S))[0]:
                if not self._closed:  # else `close` waits for what is on its way
                    await self._in_thread(lambda: self._make_again(topics))
        finally:
            done.cancel()  # nothing, where it has ended
        done.result()

    def _durable_in_thread(self, sent: Future[None], topics: Sequence[Topic]) -> None:
        """The same for reading threads."""
        while True:
            try:
                return sent.result(LOOK_EVERY_S)
            except TimeoutError:
                self._executor.submit(self._make_again, topics).result()

    def deliveries(self, topics: Sequence[Topic], group: str | None, max_in_flight: int) -> Deliveries:
        self._refuse_if_closed()
        reader = Reader(self, topics, group, max_in_flight, f"{self._client}-{len(self._readers)}")
        self._readers = [r for r in self._readers if r.alive] + [reader]
        return Deliveries(reader.inbox)

    async def lag(self, topics: Sequence[Topic], group: str) -> dict[str, int]:
        lag = dict.fromkeys((topic.name for topic in topics), 0)
        for (name, _), at in (await self.standing(topics, group)).items():
            lag[name] += at.end - at.acknowledged
        return lag

    async def standing(self, topics: Sequence[Topic], group: str) -> dict[tuple[str, int], Standing]:
        for reader in self._readers:
            if reader.group == group:
                await self._flushed(reader)
        until = time.monotonic() + COORDINATOR_WITHIN_S
        while True:
            try:
                return await self._in_thread(lambda: self._standing(topics, group))
            except _AskAgain:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def ping(self) -> None:
        self._refuse_if_closed()
        await self._probe.ping()
        if troubles := [reader.trouble for reader in self._readers if reader.alive and reader.trouble]:
            raise BusUnavailable(f"{self.cluster}: {'; '.join(troubles)}")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._probe.close()
        for reader in self._readers:
            reader.stop()
        for reader in self._readers:
            await asyncio.to_thread(reader.join)
        await asyncio.get_running_loop().run_in_executor(self._executor, self._close)
        self._executor.shutdown(wait=False)

    async def _flushed(self, reader: Reader) -> None:
        try:
            async with asyncio.timeout(FLUSH_WITHIN_S):
                await asyncio.wrap_future(reader.flush())
        except TimeoutError:
            raise BusUnavailable(
                f"{self.cluster}: what group {reader.group!r} has acknowledged is not committed after {FLUSH_WITHIN_S:.0f} s: "
                "the broker is away, or the group waits for its members; ask again"
            ) from None

    def ensure(self, topics: Sequence[Topic]) -> None:
        """Makes topics that are not there, also those that were there before. For reading threads."""
        self._executor.submit(self._ensure_anew, topics).result()

    def bury(self, items: list[tuple[Received, str]], group: str | None) -> None:
        """Durable when it returns. For reading threads."""
        sent = []
        for item, reason in items:
            topic, key, data, headers = self._letter(item, reason, group)
            sent.append(self._executor.submit(self.send, [(topic, key, data, headers)]).result())
            log.warning(
                "bus.buried",
                topic=item.topic.name,
                offset=item.offset,
                key=key,
                reason=headers["dead-letter-reason"],
            )
        for (item, reason), letter_sent in zip(items, sent, strict=True):
            try:
                self._durable_in_thread(letter_sent, [dead_letters(item.topic)])
            except _TooLarge:
                self._bury_less(item, reason, group)

    def _bury_less(self, item: Received, reason: str, group: str | None) -> None:
        """Halve a dead letter until its topic takes it. Raises BusUnavailable: the topic takes not even LEAST_LETTER_BYTES."""
        name = item.topic.dead_letter
        while True:
            try:
                sent = self._executor.submit(self.send, [self._letter(item, reason, group)]).result()
                return self._durable_in_thread(sent, [dead_letters(item.topic)])
            except _TooLarge:
                most = self._takes.get(name, LETTER_BYTES) // 2
                if most < LEAST_LETTER_BYTES:
                    raise
                self._takes[name] = most
                log.warning("bus.dead_letter_too_large", topic=name, cut_to_bytes=most)

    def _letter(self, item: Received, reason: str, group: str | None) -> tuple[Topic, str, bytes, dict[str, str]]:
        topic = dead_letters(item.topic)
        return topic, *letter(item, reason, group, self._takes.get(topic.name, LETTER_BYTES))

    def gone(self, group: str | None, found: Sequence[Gone]) -> None:
        """Counts records that no longer exist; of a group's, an alert is durable when it returns. For reading threads."""
        count(group, found)
        if group is not None:
            self._say(alert_of(group, found))

    def deleted(self, group: str | None, topics: Sequence[str]) -> None:
        """Of a group's topics an alert is durable when it returns. For reading threads."""
        if group is not None:
            self._say(alert_of_deleted(group, topics))

    def _say(self, alert: Alert) -> None:
        data, headers = codec.encode(ALERTS, alert)
        try:
            sent = self._executor.submit(self.send, [(ALERTS, alert.run, data, headers)]).result()
            self._durable_in_thread(sent, [ALERTS])
        except BusUnavailable as error:  # one who may not write alerts reads on: the metric has counted
            log.error("bus.alert_not_written", alert=alert.name, what=alert.what, error=str(error))

    def send(self, items: list[tuple[Topic, str, bytes, dict[str, str]]]) -> Future[None]:
        """In the executor thread. The future ends when all are durable, or with BusUnavailable."""
        finished: Future[None] = Future()
        durable, last = itertools.count(1), len(items)  # a count needs no lock: `next` is one step of the interpreter

        def one_is_durable(_: object) -> None:
            if next(durable) == last and not finished.done():
                finished.set_result(None)

        def one_failed(error: BaseException) -> None:  # the count never gets to the last then
            self._producer_failed = True
            with contextlib.suppress(InvalidStateError):  # only the first failure is told
                finished.set_exception(_unavailable(self.cluster, error))

        try:
            topics = {item[0].name: item[0] for item in items}
            looked_at = self._ensure(list(topics.values()))
            physical = {name: self.cluster.physical(name) for name in topics}
            producer = self._open_producer()
            self._make_again([topic for name, topic in topics.items() if physical[name] not in looked_at])
            try:
                for number, (topic, text, data, headers) in enumerate(items, 1):
                    key = text.encode()
                    pairs = [(name, value.encode()) for name, value in headers.items()]
                    sent = producer.put(physical[topic.name], partition_of(key, topic.partitions), key, data, pairs)
                    sent.add_callback(one_is_durable)
                    sent.add_errback(one_failed)
                    if number % WAKE_EVERY == 0:
                        producer.wake()
            finally:
                producer.wake()  # what was handed over goes, also where a later one cannot
        except KafkaError as error:
            self._drop_admin()
            one_failed(error)
        return finished

    # In the executor thread.

    def _options(self) -> dict[str, Any]:
        return {**self.cluster.options(), "client_id": self._client}

    def _open_producer(self) -> Producer:
        if self._producer and self._producer_failed:
            # An idempotent producer that lost a batch may refuse all that follows. Its callers know what was not sent.
            failed, self._producer = self._producer, None
            end(failed, CLOSE_WITHIN_S)
        if self._producer is None:
            self._producer_failed = False
            self._producer = connected(
                Producer,
                **self._options(),
                acks="all",
                enable_idempotence=True,
                compression_type="zstd",
                linger_ms=2,  # what is published together travels together
                delivery_timeout_ms=PUBLISH_WITHIN_MS,
                request_timeout_ms=PUBLISH_WITHIN_MS // 2,
                max_block_ms=PUBLISH_WITHIN_MS,
                allow_auto_create_topics=False,
            )
        return self._producer

    def _open_admin(self) -> KafkaAdminClient:
        if self._admin is None:
            self._admin = connected(KafkaAdminClient, **self._options())
        return self._admin

    def _make_again(self, topics: Sequence[Topic]) -> None:
        """Make topics that were there, and of which the producer has heard that they are no more."""
        producer = self._producer
        if producer is not None and not self._producer_failed:
            self._ensure_anew([one for one in topics if not producer.knows(self.cluster.physical(one.name))])

    def _ensure_anew(self, topics: Sequence[Topic]) -> None:
        self._known.difference_update(self.cluster.physical(topic.name) for topic in topics)
        self._ensure(topics)

    def _ensure(self, topics: Sequence[Topic]) -> Collection[str]:
        """Make topics that are not there. Return the physical names of those that were looked at: they were not known before."""
        names = {self.cluster.physical(topic.name): topic for topic in topics}
        wanted = {name: topic for name, topic in names.items() if name not in self._known}
        if not wanted:
            return ()
        admin = self._open_admin()
        unseen = [found["name"] for found in admin.describe_topics(list(wanted)) if found["error_code"] in UNSEEN]
        if unseen:  # to ask for one that is there is refused, too, where we may use topics and make none
            try:
                make(admin, self.cluster, [wanted[name] for name in unseen])
            except TopicAuthorizationFailedError:
                raise BusUnavailable(
                    f"{self.cluster}: user {self.cluster.user!r} may neither use nor make {', '.join(sorted(unseen))}. Where "
                    "they are not there: `etude topics apply`; where they are: `etude topics acl check` (docs/access.md)"
                ) from None
        admin.wait_for_topics(list(wanted), timeout_ms=READY_WITHIN_MS)
        for found in admin.describe_topics(list(wanted)):
            name, partitions = found["name"], len(found["partitions"])
            if partitions != wanted[name].partitions:
                raise BusUnavailable(
                    f"kafka topic {name} has {partitions} partitions, expected {wanted[name].partitions}: "
                    "move it to a topic of the declared size; keys would change their partitions"
                )
        self._known.update(wanted)
        return wanted

    def _standing(self, topics: Sequence[Topic], group: str) -> dict[tuple[str, int], Standing]:
        self._ensure(topics)
        names = {self.cluster.physical(topic.name): topic for topic in topics}
        partitions = [TopicPartition(name, p) for name, topic in names.items() for p in range(topic.partitions)]
        group = self.cluster.physical(group)
        admin = self._open_admin()
        committed = admin.list_group_offsets({group: partitions})[group]
        first = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.EARLIEST))
        end = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.LATEST))
        found = {}
        for partition in partitions:
            position = committed[partition].offset if partition in committed else -1
            last = end[partition].offset
            at = min(max(position, first[partition].offset), last)  # beyond it: a position of a log that was deleted
            found[names[partition.topic].name, partition.partition] = Standing(at, last)
        return found

    def _drop_admin(self) -> None:
        """After a failure, a new one next time: nothing of an old connection's troubles lives on."""
        admin, self._admin = self._admin, None
        if admin:
            admin.close()

    def _close(self) -> None:
        if self._producer is not None:
            end(self._producer, PUBLISH_WITHIN_MS / 1000)
        self._drop_admin()

    async def _in_thread(self, function: Callable[[], T]) -> T:
        self._refuse_if_closed()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, function)
        except KafkaError as error:
            self._executor.submit(self._drop_admin)
            if isinstance(error, UnknownTopicOrPartitionError):  # deleted: made again when it is asked for again
                self._executor.submit(self._known.clear)
            raise _unavailable(self.cluster, error) from None

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise BusUnavailable("the bus of this process is closed")
