"""kafka-python's clients: opened without leaks, the consumer with our settings, and the few things that have no public name.
Nothing else touches its insides, so that another version of it is held against this file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar
from uuid import UUID

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient
from kafka.structs import OffsetAndMetadata

from shared.bus.kafka_batches import Records
from shared.bus.kafka_cluster import Cluster

FETCH_MS = 50  # the broker holds a fetch that finds nothing so long, and a commit on the same connection behind it
JOIN_MS = 1_000  # between looks, while a join waits for the other members: whether this one is to end
SESSION_MS, HEARTBEAT_MS = 10_000, 3_000  # a dead member's partitions move after the session
LONGEST_POLL_MS = 300_000  # between two polls: a thread that is stuck for so long has left its group
METADATA_MS = 15_000  # a leader that assigned too little for want of metadata mends it after so long
NOTES_WITHIN_MS = 30_000  # as long as kafka-python gives every request

Client = TypeVar("Client")


def connected(kind: Callable[..., Client], **options: Any) -> Client:
    """A client of kafka-python. Its constructors start a thread, then wait for a broker; where none comes they raise, and leave
    thread and sockets behind. Here these end, however often it is tried."""
    begun: list[KafkaNetClient] = []

    def net(**config: Any) -> KafkaNetClient:
        begun.append(KafkaNetClient(**config))
        return begun[-1]

    try:
        return kind(kafka_client=net, **options)
    except BaseException:
        for one in begun:
            one.close()
        raise


def end(producer: KafkaProducer, within_s: float) -> None:
    """Sends what it still can. `close` first waits for every batch, and where one does not end in time it raises and closes
    nothing; there are batches that never end (of a broker that hung, and went on). Such a producer is stopped the hard way."""
    try:
        producer.close(timeout=within_s)
    except KafkaError:
        producer._sender.force_close()
        producer._closed = True


class Producer(KafkaProducer):
    def put(self, topic: str, partition: int, key: bytes, value: bytes, headers: list[tuple[str, bytes]]) -> Any:
        """`send` without its questions: what is sent here has a partition and is bytes. Nobody is woken: `wake` follows."""
        if partition not in self._metadata._partitions.get(topic, ()):  # not known yet, or not any more
            return self.send(topic, value=value, key=key, headers=headers, partition=partition)
        self._ensure_valid_record_size(self._estimate_size_in_bytes(key, value, headers))
        return self._accumulator.append(TopicPartition(topic, partition), None, key, value, headers)[0]

    def knows(self, topic: str) -> bool:
        """Whether the topic is in its metadata, which is read again after minutes, and when a message could not be sent."""
        return bool(self._metadata._partitions.get(topic))

    def wake(self) -> None:
        """The sender looks at what there is to send."""
        self._sender.wakeup()


class Consumer(KafkaConsumer):
    @classmethod
    def open(cls, cluster: Cluster, client: str, group: str | None, topics: Collection[str]) -> Consumer:
        """`topics`: physical names; they, or their partitions, are still to be subscribed. What it polls are `Record`s."""
        consumer = connected(
            cls,
            **cluster.options(),
            client_id=client,
            group_id=None if group is None else cluster.physical(group),
            group_instance_id=None if group is None else cluster.member(topics),
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            allow_auto_create_topics=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            max_poll_interval_ms=LONGEST_POLL_MS,
            fetch_max_wait_ms=FETCH_MS,
            metadata_max_age_ms=METADATA_MS,
            partition_assignment_strategy=(CooperativeStickyAssignor,),
        )
        consumer._fetcher.PartitionRecords = Records
        return consumer

    def hold_fetches(self, milliseconds: int) -> None:
        """From the next one on, instead of FETCH_MS. What comes is fetched at once however long they are held."""
        self._fetcher.config["fetch_max_wait_ms"] = milliseconds

    def topic_ids(self, topics: Iterable[str]) -> dict[str, UUID]:
        """Return the ids of the topics that its metadata has. One that was deleted and made again has a new id."""
        found = {name: self._cluster.topic_id(name) for name in topics}
        return {name: topic_id for name, topic_id in found.items() if topic_id is not None and topic_id.int}

    def joining(self) -> bool:
        """A poll began a join and did not see its end. No commits are taken, and no heartbeats are sent."""
        return bool(self._coordinator.rebalance_in_progress())

    def join_on(self) -> None:
        """Waits for a join, JOIN_MS at most.

        kafka-python 3.0 ends a join only in a poll that waits when the answer comes: an answer that comes between two polls
        is thrown away, and the group asked for another, or, where new metadata was the reason, not even that: such a
        member would neither commit nor send heartbeats ever again. Hence a long wait, and the word that it is needed.
        """
        self._coordinator.request_rejoin()
        self._coordinator.poll(timeout_ms=JOIN_MS)

    # In its I/O thread.

    async def sleep(self, seconds: float) -> None:
        await self._net.sleep(seconds)

    async def noted(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        """Positions with their metadata, which `committed` leaves out."""
        known: dict[TopicPartition, OffsetAndMetadata] = await self._coordinator.fetch_committed_offsets_async(
            list(partitions), timeout_ms=NOTES_WITHIN_MS
        )
        return known
