"""The reading side of the bus on Kafka: one consumer in one thread per `deliveries()`.

Invariants
- Commits are the adapter's own, never automatic (`kafka_partitions` says what is in them).
- An inbox that stays full pauses its partitions, so that the consumer stays in its group, and takes its part in rebalances, while
  nothing is read.
- A join that was begun is seen to its end before anything else is read: the group takes no commits meanwhile, and what is
  read would all come again, should this member be left out of the next assignment.
- Rebalances are cooperative: only partitions that move are revoked, and a revoked one waits a short while for what is in
  flight before its position is committed and handed over.
- A consumer that breaks is made anew, after a pause that grows; what it held comes again.
- A topic that was deleted and made again is another log: it is read from its beginning.
- A message is buried by the owner of its partition alone. Its dead letter and its position are two writes: where the partition
  is lost, or the process dies, between them, the next owner writes a second letter (of the same `dead-letter-source`).
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol

import structlog
from kafka import TopicPartition
from kafka.consumer.subscription_state import AsyncConsumerRebalanceListener
from kafka.errors import (
    CommitFailedError,
    FencedInstanceIdError,
    KafkaError,
    OffsetMetadataTooLargeError,
    RebalanceInProgressError,
)
from kafka.structs import OffsetAndMetadata

from shared.bus import BusUnavailable
from shared.bus.gone import Gone
from shared.bus.inbox import Inbox, Received
from shared.bus.kafka_clients import FETCH_MS, Consumer
from shared.bus.kafka_cluster import Cluster
from shared.bus.kafka_partitions import Partitions, Records
from shared.bus.kafka_records import REASON_BYTES
from shared.contracts.topics import Topic

POLL_MS = 50  # a consumer cannot be woken: acknowledgements wait so long for their commit at most
IDLE_AFTER_S, IDLE_POLL_MS, IDLE_FETCH_MS = 2.0, 250, 500  # while nothing was in hand for so long
COMMIT_EVERY_S = 0.1
PATIENCE_S = 0.5  # with a full inbox: a pause stops what is fetched ahead, and most have room again within milliseconds
REVOKE_GRACE_S = 5.0
COMMIT_WITHIN_S = 3.0  # at a rebalance; the others wait for us meanwhile, and what is not committed comes twice
LAST_COMMIT_S = 12.0  # of a member that leaves in the middle of a rebalance: longer than a session
PAUSE_S = 0.02  # between looks at what is in flight, while partitions are handed back
BACK_OFF_S, BACK_OFF_MAX_S = 0.5, 10.0

log = structlog.get_logger()


class Writer(Protocol):
    """What a reader needs of its bus. Both block, and may be called from any thread but the bus's own."""

    cluster: Cluster

    def ensure(self, topics: Sequence[Topic]) -> None:
        """Makes topics that are not there."""

    def bury(self, items: list[tuple[Received, str]], group: str | None) -> None:
        """To the dead letters, with the reason; durable when it returns."""

    def gone(self, group: str | None, found: Sequence[Gone]) -> None:
        """Says that records no longer exist."""

    def deleted(self, group: str | None, topics: Sequence[str]) -> None:
        """Says that topics were deleted, and made again, while they were read."""


class Reader(AsyncConsumerRebalanceListener):
    """One consumer in one thread, from `deliveries()` to the end of its iterator.

    The listener's calls come from the consumer's own I/O thread, while `poll` may be running: the lock of the partitions guards
    all that both touch, and is never held over a call to the broker.
    """

    def __init__(self, bus: Writer, topics: Sequence[Topic], group: str | None, max_in_flight: int, name: str) -> None:
        self.group = group
        self._signal = threading.Event()
        self.inbox = Inbox(max_in_flight, self._signal.set, group)
        self._bus = bus
        self._cluster = bus.cluster
        self._topics = {bus.cluster.physical(topic.name): topic for topic in topics}
        self._partitions = Partitions(self._topics, group, self.inbox)
        self._lock = self._partitions.lock
        self._burying: list[tuple[Received, str]] = []
        self._grace_s = REVOKE_GRACE_S
        self._paused = False
        self._full_since = math.inf  # monotonic
        self._next_commit = 0.0
        self._busy_at = time.monotonic()
        self._back_off_s = BACK_OFF_S
        self._past: dict[TopicPartition, int] | None = None  # without a group: where the partitions ended at the start
        self._flushes: list[Future[None]] = []
        self._ended = False
        self._well_since = math.inf  # monotonic: first poll with partitions since the last failure
        self.trouble = ""  # why nothing is read; empty: reading works
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"kafka-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """The process leaves: what is in flight is not waited for."""
        self._grace_s = 0.0
        self.inbox.close()

    def join(self) -> None:
        self._thread.join()

    def flush(self) -> Future[None]:
        """Ends when everything that was settled before the call is committed, and when this reader has ended. It holds no
        thread, and may be cancelled: while the broker is away, or a join takes long, it is for the caller to give up."""
        done: Future[None] = Future()
        with self._lock:
            if self._ended or not (self.inbox.settled or self._burying or self._moved(self._partitions.leases)):
                done.set_result(None)
                return done
            self._flushes.append(done)
        self._signal.set()
        return done

    # In the thread.

    def _run(self) -> None:
        while not self._over():
            try:
                self._read()
            except FencedInstanceIdError:  # to come back would fence the other in its turn
                self.inbox.close(
                    BusUnavailable(f"{self._cluster}: another replica uses instance={self._cluster.instance}")
                )
            except (KafkaError, BusUnavailable, OSError) as error:
                said = str(error) or repr(error)
                self.trouble = f"{', '.join(sorted(self._topics))} cannot be read (group {self.group}): {said}"
                log.error("bus.kafka", error=said, topics=list(self._topics), group=self.group)
                self._partitions.lose(list(self._partitions.leases))
                self._rest()
            except BaseException as error:
                log.exception("bus.reader_died")
                self.inbox.close(BusUnavailable(f"the Kafka reader of this process died: {error!r}"))
        self.inbox.close()
        with self._lock:
            self._ended = True
        self._flushed(self._flushes)

    def _flushed(self, flushes: list[Future[None]]) -> None:
        with self._lock:
            self._flushes = [done for done in self._flushes if done not in flushes]
        for done in flushes:
            if done.set_running_or_notify_cancel():  # else its caller has given up
                done.set_result(None)

    def _rest(self) -> None:
        """After a failure: longer each time, until something was read again; never in step with the others."""
        self._well_since = math.inf
        until = time.monotonic() + self._back_off_s * random.uniform(0.5, 1.0)
        self._back_off_s = min(BACK_OFF_MAX_S, 2 * self._back_off_s)
        while time.monotonic() < until and not self._over():
            time.sleep(PAUSE_S)

    def _over(self) -> bool:
        return self.inbox.closed or self.inbox.abandoned

    def _read(self) -> None:
        """Until the inbox is closed or the consumer breaks."""
        self._bus.ensure(list(self._topics.values()))
        consumer = Consumer.open(self._cluster, self._name, self.group, self._topics)
        self._consumer = consumer
        if self.group is None:
            self._partitions.begin()
        try:
            if self.group is None:
                partitions = [TopicPartition(name, p) for name, t in self._topics.items() for p in range(t.partitions)]
                consumer.assign(partitions)
                consumer.seek_to_beginning(*partitions)
                if self._past is None or self.inbox.past_again():
                    self._past = consumer.end_offsets(partitions)
            else:
                consumer.subscribe(list(self._topics), listener=self)
                for name in self._topics:  # a leader that has not heard of a new topic would assign none of it, and
                    consumer.partitions_for_topic(name)  # one that hears of it after it has joined joins again
            while not self._over():
                self._cycle(consumer)
            self._hand_back_all()
        finally:
            consumer.close(autocommit=False)

    def _cycle(self, consumer: Consumer) -> None:
        self._settle_and_commit()
        room = self.inbox.room()
        if room > 0:
            self._full_since = math.inf
        else:
            self._full_since = min(self._full_since, time.monotonic())
        full = time.monotonic() - self._full_since >= PATIENCE_S
        if full is not self._paused:
            self._paused = full
            (consumer.pause if full else consumer.resume)(*consumer.assignment())
        if room > 0 or full:
            records = consumer.poll(timeout_ms=0 if full else self._pace(), max_records=max(1, room))
            records = self._begin_again(consumer, records)
            self._look_for_gone(consumer, records)
            self._take(records)
            self._reads(bool(records), bool(consumer.assignment()))
            while self._joining() and not self._over():
                consumer.join_on()
            self._look_back(consumer)
        if room <= 0:
            self._signal.wait(POLL_MS / 1000)
            self._signal.clear()

    def _settle_and_commit(self) -> None:
        with self._lock:
            flushes = list(self._flushes)
        self._settle()
        if (flushes or time.monotonic() >= self._next_commit) and self._commit():
            self._flushed(flushes)

    def _look_back(self, consumer: Consumer) -> None:
        """Says so, once what was there at the start has been read."""
        if self._past is None or not consumer.assignment():
            return
        for partition, end in list(self._past.items()):
            if (consumer.position(partition, timeout_ms=POLL_MS) or 0) >= end:
                del self._past[partition]
        if not self._past:
            self.inbox.past_read()

    def _reads(self, records: bool, assigned: bool) -> None:
        """A poll went well. One that gave nothing proves little: what cannot be read may stand in the next fetch."""
        if not self.trouble or not assigned:
            return
        self._well_since = min(self._well_since, time.monotonic())
        if records or time.monotonic() - self._well_since > BACK_OFF_MAX_S:
            self.trouble = ""

    def _joining(self) -> bool:
        return self.group is not None and self._consumer.joining()

    def _pace(self) -> int:
        """Milliseconds for the next poll to wait. Twenty polls and fetches a second are a tenth of a core for each reader, and
        a platform has dozens: who has had nothing in hand for a while asks less often. What comes then is still handed out
        at once; only the end of the reader, a flush and a rebalance are seen a little later."""
        now = time.monotonic()
        if self.inbox.in_flight or self._flushes or self._burying:
            self._busy_at = now
        idle = now - self._busy_at > IDLE_AFTER_S
        self._consumer.hold_fetches(IDLE_FETCH_MS if idle else FETCH_MS)
        return IDLE_POLL_MS if idle else POLL_MS

    def _begin_again(self, consumer: Consumer, records: Records) -> Records:
        """Go to the beginning of every log that is another than before. Return the records of the others."""
        again, partitions = self._partitions.begin_again(
            consumer.assignment(), consumer.topic_ids(self._topics), records
        )
        if not again:
            return records
        names = sorted(self._topics[name].name for name in again)
        log.error("bus.topic_made_again", topics=names, group=self.group)
        if partitions:
            consumer.seek_to_beginning(*partitions)
        if self._past is not None:  # what was there at the start is no more
            self._past = {partition: end for partition, end in self._past.items() if partition.topic not in again}
            if not self._past:
                self.inbox.past_read()
        self._bus.deleted(self.group, names)
        return {partition: found for partition, found in records.items() if partition not in partitions}

    def _look_for_gone(self, consumer: Consumer, records: Records) -> None:
        """Says how many records retention deleted before we read them."""
        asked = self._partitions.to_ask(consumer.assignment(), records)
        if asked:
            oldest = consumer.beginning_offsets(asked)
            if lost := self._partitions.gone({partition: oldest[partition] for partition in asked}, records):
                self._bus.gone(self.group, lost)
            self._partitions.asked(asked)

    def _take(self, records: Records) -> None:
        items = []
        with self._lock:
            for item, unreadable in self._partitions.take(records):
                if unreadable:
                    self._refuse(item, unreadable)
                else:
                    items.append(item)
        if items:
            self._back_off_s, self._busy_at = BACK_OFF_S, time.monotonic()
            self.inbox.offer(items)

    def _refuse(self, item: Received, unreadable: str) -> None:
        """A group has it on its way to the dead letters; a reader without one passes it over."""
        if self.group is None:
            item.lease.tracker.done(item.offset)
            self.inbox.skip(item, unreadable[:REASON_BYTES])
        else:
            self._burying.append((item, unreadable))

    def _settle(self) -> None:
        """Moves the trackers; a buried message counts when its dead letter is durable. Of a partition that was lost meanwhile
        nothing is buried: its next owner gets the message again, and would write a second letter."""
        self._collect()
        with self._lock:
            self._burying = [entry for entry in self._burying if entry[0].lease.live]
            burying = list(self._burying)
        if burying:
            self._bus.bury(burying, self.group)
            self.inbox.buried(item for item, _ in burying)
            with self._lock:
                del self._burying[: len(burying)]
                for item, _ in burying:
                    item.lease.tracker.done(item.offset)

    def _collect(self) -> None:
        with self._lock:
            for item, reason in self.inbox.drain():
                if reason is not None:
                    self._burying.append((item, reason))
                elif item.lease.live:
                    item.lease.tracker.done(item.offset)

    def _moved(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        """What there is to commit."""
        if not self._partitions.leases:  # perhaps there is no consumer yet
            return {}
        return self._partitions.moved(partitions, self._consumer.topic_ids(self._topics))

    def _commit(self) -> bool:
        """False: the group is between two assignments, and takes no commit until the join has ended."""
        self._next_commit = time.monotonic() + COMMIT_EVERY_S
        moved = self._moved(list(self._partitions.leases))
        if not moved:
            return True
        try:
            self._consumer.commit(moved)
        except OffsetMetadataTooLargeError:  # this broker takes less than is usual: positions alone, from now on
            self._partitions.notes = False
            return False
        except RebalanceInProgressError:
            return False
        except CommitFailedError as error:  # the group went on without us: somebody else reads them again
            log.warning("bus.commit_fenced", group=self.group, error=str(error))
            return True
        self._partitions.committed(moved)
        return True

    def _in_flight(self, partitions: Iterable[TopicPartition]) -> int:
        """How much of `partitions`, which are being handed back, is with the consumer. Nothing new of them goes out."""
        return self._partitions.revoke(partitions, time.monotonic() + self._grace_s)

    def _hand_back_all(self) -> None:
        """At the end: waits a while for what is in flight, then commits."""
        until = time.monotonic() + self._grace_s
        while self._in_flight(list(self._partitions.leases)) and time.monotonic() < until:
            self._settle_and_commit()
            time.sleep(PAUSE_S)
        self._settle()
        until = time.monotonic() + LAST_COMMIT_S
        while not self._commit():
            if time.monotonic() > until:
                log.warning("bus.last_commit", group=self.group, partitions=len(self._partitions.leases))
                break
            if self._joining():
                self._consumer.join_on()
        self._partitions.lose(list(self._partitions.leases))

    # In the consumer's I/O thread.

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        partitions = list(revoked)
        until = time.monotonic() + self._grace_s
        while self._in_flight(partitions) and time.monotonic() < until:
            await self._consumer.sleep(PAUSE_S)
        self._collect()
        until = time.monotonic() + COMMIT_WITHIN_S
        while moved := self._moved(partitions):
            try:
                await self._consumer.commit_async(moved)
                break
            except KafkaError as error:
                if not isinstance(error, RebalanceInProgressError) or time.monotonic() > until:
                    # What was acknowledged lately comes again, to the next owner.
                    log.warning("bus.commit_at_rebalance", group=self.group, error=type(error).__name__)
                    break
                await self._consumer.sleep(PAUSE_S)
        self._partitions.lose(partitions)

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Position and notes come from one reading; kafka-python's own would leave the notes out."""
        partitions = list(assigned)
        if self._paused:
            self._consumer.pause(*partitions)
        known = await self._consumer.noted(partitions)
        self._partitions.assigned(partitions, known, self._consumer.topic_ids(self._topics))
        for partition, committed in known.items():
            self._consumer.seek(partition, committed.offset)

    async def on_partitions_lost(self, lost: Iterable[TopicPartition]) -> None:
        self._partitions.lose(lost)
