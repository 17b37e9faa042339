"""What a reader of Kafka knows of its partitions: positions, leases, and which log each topic is. No call of it goes to a broker.

Invariants
- What is committed is the lowest contiguous offset; what is finished beyond it rides in the commit's metadata, and the next
  owner does not hand it out again.
- A topic that was deleted and made again is another log, with another id. No position of the old log is committed to the new one,
  and none that another member committed late is taken for one: a commit's metadata names the log that it is of.
- An id that was replaced never comes back: it is that of a broker which has not heard of the new log yet.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from uuid import UUID

from kafka import TopicPartition
from kafka.structs import OffsetAndMetadata

from shared.bus.gone import Gone, missing
from shared.bus.inbox import Inbox, Lease, Received
from shared.bus.kafka_batches import Record
from shared.bus.kafka_records import received
from shared.bus.tracking import TAG, read_ranges
from shared.contracts.topics import Topic

_MARKED = re.compile(r"(.*) ([0-9a-f]{32})", re.DOTALL)

Records = dict[TopicPartition, list[Record]]


def marked(finished: str, log: UUID | None) -> str:
    """Return the metadata of a commit: what is finished beyond its position, and the topic's id where it is known."""
    return finished if log is None else f"{finished or TAG} {log.hex}"


def unmarked(metadata: str) -> tuple[str, UUID | None]:
    """Return the two parts of what `marked` returned. Foreign metadata and that of earlier releases name no log."""
    found = _MARKED.fullmatch(metadata) if metadata.startswith(TAG) else None
    return (found[1], UUID(found[2])) if found else (metadata, None)


class Partitions:
    """`lock` guards all of it: the listener's calls come from the consumer's own I/O thread. It is never held over a call to the
    broker. `topics`: by their physical names. `group` None: all is read, and nothing committed."""

    def __init__(self, topics: Mapping[str, Topic], group: str | None, inbox: Inbox) -> None:
        self.lock = threading.RLock()
        self.leases: dict[TopicPartition, Lease] = {}
        self.notes = True  # commits have metadata
        self._topics, self._group, self._inbox = topics, group, inbox
        self._known: dict[TopicPartition, OffsetAndMetadata] = {}  # as earlier owners committed
        self._next: dict[TopicPartition, int] = {}  # offsets that the log should give next, where we know them
        self._fresh: set[TopicPartition] = set()  # assigned, and not yet asked what of them exists
        self._foreign: set[TopicPartition] = set()  # their committed position is of another log
        self._ids: dict[str, UUID] = {}  # of the logs that are read
        self._replaced: set[UUID] = set()  # of logs that are no more

    def assigned(
        self,
        partitions: Sequence[TopicPartition],
        known: Mapping[TopicPartition, OffsetAndMetadata],
        ids: Mapping[str, UUID],
    ) -> None:
        """Take them, with what was committed of them. `ids`: of the topics, as far as the metadata has them."""
        with self.lock:
            self._fresh.update(partitions)
            for partition, committed in known.items():
                finished, log = unmarked(committed.metadata or "")
                self._known[partition] = OffsetAndMetadata(committed.offset, finished, -1)
                self._next[partition] = committed.offset
                if log is None:
                    continue
                mine = self._ids.get(partition.topic) or self._living(ids).get(partition.topic)
                if mine is None and log not in self._replaced:
                    self._ids[partition.topic] = log  # the metadata may still say that it is gone
                elif mine != log:
                    self._foreign.add(partition)

    def made_again(self, ids: Mapping[str, UUID]) -> set[str]:
        """Return the topics that were deleted and made again since they were read."""
        with self.lock:
            return {name for name, log in self._living(ids).items() if self._ids.setdefault(name, log) != log}

    def begin_again(
        self, assigned: Collection[TopicPartition], ids: Mapping[str, UUID], records: Records
    ) -> tuple[set[str], list[TopicPartition]]:
        """Forget the logs that are no more. Return the topics that had them, and the partitions that have to be read from the
        beginning: all of a topic that was made again, else those whose committed position is of another log."""
        with self.lock:
            again = self.made_again(ids)
            for name in again:
                self._replaced.add(self._ids[name])
                self._ids[name] = ids[name]
            # A client that asks by names alone may read the new log before it hears of its id: offsets then go back.
            again |= {p.topic for p, found in records.items() if found[0].offset < self._next.get(p, 0)}
            partitions = [p for p in assigned if p.topic in again or p in self._foreign]
            self.lose(partitions)
            self._fresh.update(partitions)
            return again | {partition.topic for partition in partitions}, partitions

    def _living(self, ids: Mapping[str, UUID]) -> dict[str, UUID]:
        """Without those of a broker that has not heard of the new log yet."""
        return {name: log for name, log in ids.items() if log not in self._replaced}

    def begin(self) -> None:
        """All is read again, by a reader without a group."""
        self._next.clear()

    def to_ask(self, assigned: Collection[TopicPartition], records: Records) -> list[TopicPartition]:
        """Return the partitions whose oldest record must be asked for: new ones, and those in which something is missing."""
        with self.lock:
            asked = self._fresh | {
                partition
                for partition, found in records.items()
                if found[0].offset > self._next.get(partition, found[0].offset)
                and not self._topics[partition.topic].compacted  # to compact leaves gaps in every place
            }
            return sorted(asked & set(assigned))

    def gone(self, oldest: Mapping[TopicPartition, int], records: Records) -> list[Gone]:
        """Return what no longer exists of the partitions that were asked for: what lies between a position and the oldest record.
        A partition of which nothing was committed gets its position now, or what goes before the first record comes would be
        missed by nobody."""
        lost = []
        with self.lock:
            for partition, first in oldest.items():
                known = self._known.get(partition)
                if records.get(partition):  # read before retention went on
                    first = min(first, records[partition][0].offset)
                finished = [] if known is None else read_ranges(known.offset, known.metadata)
                if range_ := missing(self._next.get(partition, first), first, finished):
                    lost.append(Gone(self._topics[partition.topic].name, partition.partition, *range_))
                self._next[partition] = max(first, self._next.get(partition, first))
                if self._group is not None and partition not in self.leases and (range_ or known is None):
                    lease = Lease(self._topics[partition.topic], partition.partition, first, finished)
                    lease.committed = -1  # so that the next commit writes it
                    self.leases[partition] = lease
        return lost

    def asked(self, partitions: Iterable[TopicPartition]) -> None:
        """What is gone of them was said."""
        with self.lock:
            self._fresh -= set(partitions)

    def take(self, records: Records) -> list[tuple[Received, str]]:
        """Return what was read and nobody has finished, each with why it cannot be read ("": it can)."""
        items = []
        with self.lock:
            for partition, found in records.items():
                self._next[partition] = found[-1].offset + 1
                lease = self.leases.get(partition)
                if lease is None:
                    topic, known = self._topics[partition.topic], self._known.get(partition)
                    finished = [] if known is None else read_ranges(known.offset, known.metadata)
                    lease = self.leases[partition] = Lease(topic, partition.partition, found[0].offset, finished)
                give = lease.tracker.give
                # What `give` says True of, an earlier owner finished.
                items += [received(self._inbox, lease, record) for record in found if not give(record.offset)]
        return items

    def moved(
        self, partitions: Iterable[TopicPartition], ids: Mapping[str, UUID]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return what there is to commit."""
        if self._group is None:
            return {}
        with self.lock:
            found: dict[TopicPartition, OffsetAndMetadata] = {}
            again = self.made_again(ids) if self.leases else set()
            for partition in partitions:
                if partition.topic in again or partition in self._foreign:
                    continue  # a position of the log that is gone
                if (lease := self.leases.get(partition)) is not None:
                    position, finished = lease.standing() if self.notes else (lease.tracker.position, "")
                    if (position, finished) != (lease.committed, lease.noted):
                        log = self._ids.get(partition.topic) if self.notes else None
                        found[partition] = OffsetAndMetadata(position, marked(finished, log), -1)
            return found

    def committed(self, moved: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        with self.lock:
            for partition, offset in moved.items():
                if (lease := self.leases.get(partition)) is not None:
                    finished = unmarked(offset.metadata)[0]
                    lease.committed, lease.noted = offset.offset, "" if finished == TAG else finished

    def revoke(self, partitions: Iterable[TopicPartition], until: float) -> int:
        """Return how much of `partitions`, which are being handed back, is with the consumer. Nothing new of them goes out."""
        count = 0
        with self.lock:
            for partition in partitions:
                if partition in self.leases:
                    self.leases[partition].revoke_by = until
                    count += self._inbox.withdraw(self.leases[partition])
        return count

    def lose(self, partitions: Iterable[TopicPartition]) -> None:
        with self.lock:
            for partition in list(partitions):
                self._known.pop(partition, None)
                self._next.pop(partition, None)
                self._fresh.discard(partition)
                self._foreign.discard(partition)
                lease = self.leases.pop(partition, None)
                if lease:
                    lease.live = False
                    self._inbox.withdraw(lease)
