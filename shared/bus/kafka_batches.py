"""Records out of the batches that a broker sends: kafka-python's own reading in one loop, at less than half its cost.

What a record is, and where its parts stand: https://kafka.apache.org/documentation/#recordbatch.

Invariants
- Headers' names are text to kafka-python, and one that is none would end the consumer, and each that comes after it at the
  same place. Anybody may write such: here its bytes beyond ASCII become question marks, and the record a delivery like any other.
- A batch that is damaged raises CorruptRecordError, after the records before the damage.
- What a transaction took back is read like anything else (`isolation_level` is not looked at): nobody here writes in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from kafka import TopicPartition
from kafka import codec as codecs
from kafka.consumer.fetcher import Fetcher
from kafka.errors import CorruptRecordError, UnsupportedCodecError
from kafka.record.default_records import DefaultRecordBatch
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import decode_varint

FORMAT = 2  # of batches, since Kafka 0.11
READS = {
    "snappy": codecs.has_snappy,
    "lz4": codecs.has_lz4,
    "zstd": codecs.has_zstd,
    **dict.fromkeys(("gzip", "uncompressed", "producer"), codecs.has_gzip),
}
NAMES = ("uncompressed", "gzip", "snappy", "lz4", "zstd")  # by the number in a batch


class Record(msgspec.Struct, frozen=True, gc=False):
    """`headers`: of two with one name the last; without a value (Kafka has such) an empty one."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, str]


class Records(Fetcher.PartitionRecords):
    """Of one partition, as one fetch brought them. Everything but the reading is kafka-python's."""

    def _unpack_records(self, partition: TopicPartition, records: MemoryRecords, *_: Any) -> Iterator[Record]:
        while (batch := records.next_batch()) is not None:
            if not batch.validate_crc():
                raise CorruptRecordError(
                    f"{partition}: the batch at offset {batch.base_offset} is not as it was written"
                )
            found: Iterator[Record]
            if batch.magic < FORMAT:
                found = (Record(each.offset, each.key, each.value, {}) for each in batch)
            else:
                self.leader_epoch = batch.leader_epoch
                self.bytes_read += batch.size_in_bytes
                self.records_read += batch.records_count
                # A control batch is of a transaction, and nobody's message.
                found = iter(()) if batch.is_control_batch else read(batch)
            for record in found:
                self.next_fetch_offset = record.offset + 1
                yield record
            if batch.magic >= FORMAT:  # a compacted topic keeps the place of what is gone
                self.next_fetch_offset = batch.next_offset
        self.drain()


def unreadable(codec: str) -> str:
    """Return why nothing of a topic with this `compression.type` can be read here, with the way out; empty: it can be read."""
    if not codec or READS.get(codec, lambda: False)():
        return ""
    return (
        f"records compressed with {codec} cannot be read by this installation. Way out: pip install 'etude[kafka]' on every "
        "machine, or compression.type=producer on the topic, once what is there has been read elsewhere or deleted"
    )


def read(batch: DefaultRecordBatch) -> Iterator[Record]:
    """Its records, in order. Raises CorruptRecordError, UnsupportedCodecError."""
    kind = batch.compression_type
    if why := unreadable(NAMES[kind] if kind < len(NAMES) else f"codec {kind}"):
        raise UnsupportedCodecError(why)
    try:
        batch._maybe_uncompress()
    except Exception as error:  # each compressor has its own
        raise CorruptRecordError(f"what is compressed cannot be read: {error!r}") from error
    data, base = bytes(memoryview(batch._buffer)[batch._pos :]), batch.base_offset
    pos = 0
    try:
        for _ in range(batch.records_count):
            size, pos = decode_varint(data, pos)
            end = pos + size
            pos += 1  # attributes, of which there are none yet
            while data[pos] & 0x80:  # the time, beside the batch's
                pos += 1
            delta, pos = decode_varint(data, pos + 1)
            length, pos = decode_varint(data, pos)
            key = None
            if length >= 0:
                key = data[pos : pos + length]
                pos += length
            length, pos = decode_varint(data, pos)
            value = None
            if length >= 0:
                value = data[pos : pos + length]
                pos += length
            headers: dict[str, str] = {}
            count, pos = decode_varint(data, pos)
            for _ in range(count):
                length = data[pos]
                if length & 0x81:
                    length, pos = decode_varint(data, pos)
                    if length < 0:  # it would be read again and again
                        raise CorruptRecordError(f"a header's name of {length} bytes")
                else:  # as nearly always: below 64 characters
                    length >>= 1
                    pos += 1
                name = data[pos : pos + length]
                pos += length
                length = data[pos]
                if length & 0x81:
                    length, pos = decode_varint(data, pos)
                else:
                    length >>= 1
                    pos += 1
                if length >= 0:
                    said = data[pos : pos + length]
                    pos += length
                else:
                    said = b""
                try:
                    headers[name.decode()] = said.decode()
                except UnicodeDecodeError:
                    headers[_ascii(name)] = said.decode("utf-8", "replace")
            if pos != end:
                raise CorruptRecordError(f"a record of {size} bytes ends after {pos - end + size}")
            yield Record(base + delta, key, value, headers)
    except (IndexError, ValueError) as error:
        raise CorruptRecordError(f"no record: {error!r}") from error
    if pos != len(data):
        raise CorruptRecordError(f"{len(data) - pos} bytes behind the last record")


def _ascii(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else "?" for byte in name)
