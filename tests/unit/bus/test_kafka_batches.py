"""Records as they come from a broker: what kafka-python reads is read alike, and what would end its consumer is read too."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import TopicPartition
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords
from kafka.record.util import calc_crc32c, encode_varint

from shared.bus.kafka_batches import Record, Records, read


class Name(str):
    """Written as these bytes, which need not be text."""

    data: bytes

    def encode(self, *_: object) -> bytes:
        return self.data


def name(data: bytes) -> Name:
    made = Name("x" * len(data))
    made.data = data
    return made


Given = tuple[bytes | None, bytes | None, list[tuple[bytes, bytes]]]
RECORD = st.tuples(
    st.none() | st.binary(max_size=9),
    st.none() | st.binary(max_size=300),
    st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=4),
)


def batch(records: list[Given], compression: int) -> bytearray:
    builder = DefaultRecordBatchBuilder(2, compression, False, -1, -1, -1, 1 << 20)
    for offset, (key, value, headers) in enumerate(records):
        builder.append(offset, 1_000 * offset, key, value, [(name(told), said) for told, said in headers])
    return bytearray(builder.build())


def shown(told: bytes) -> str:
    try:
        return told.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else "?" for byte in told)


def changed(data: bytearray, attributes: int, base: int = 0) -> bytes:
    """With other attributes and another first offset, as a broker writes them."""
    struct.pack_into(">q", data, 0, base)
    struct.pack_into(">h", data, DefaultRecordBatch.ATTRIBUTES_OFFSET, attributes)
    struct.pack_into(
        ">I",
        data,
        DefaultRecordBatch.CRC_OFFSET,
        calc_crc32c(memoryview(data)[DefaultRecordBatch.ATTRIBUTES_OFFSET :]),
    )
    return bytes(data)


def varint(number: int) -> bytes:
    written = bytearray()
    encode_varint(number, written.append)
    return bytes(written)


def fetched(data: bytes, offset: int = 0) -> Records:
    return Records(offset, TopicPartition("t", 0), MemoryRecords(data))


@given(st.lists(RECORD, min_size=1, max_size=200), st.sampled_from([0, 1, 4]))
def test_any_name_is_read_and_nothing_else_changes(records: list[Given], compression: int) -> None:
    assert list(read(DefaultRecordBatch(batch(records, compression)))) == [
        Record(offset, key, value, {shown(told): said.decode("utf-8", "replace") for told, said in headers})
        for offset, (key, value, headers) in enumerate(records)
    ]


PLAIN = st.tuples(
    st.none() | st.binary(max_size=99),
    st.none() | st.binary(max_size=20_000),
    st.lists(st.tuples(st.text(max_size=99), st.none() | st.text(max_size=99).map(str.encode)), max_size=4),
)


@given(st.lists(PLAIN, min_size=1, max_size=5), st.integers(0, 2**62), st.integers(-(2**40), 2**40))
def test_what_kafka_python_reads_is_read_alike(records: list[Given], base: int, later: int) -> None:
    builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1 << 20)
    for offset, (key, value, headers) in enumerate(records):
        builder.append(offset, offset * later, key, value, headers)
    data = changed(bytearray(builder.build()), 0, base)
    assert list(read(DefaultRecordBatch(data))) == [
        Record(each.offset, each.key, each.value, {told: (said or b"").decode() for told, said in each.headers})
        for each in DefaultRecordBatch(data)
    ]


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_record_is_told_as_such_and_nothing_worse(at: int, byte: int) -> None:
    data = batch([(b"k", b"value" * 9, [(b"na\xff\xc3me", b"v"), (b"\xfe", b"w")])] * 2, 0)
    first = DefaultRecordBatch.HEADER_STRUCT.size
    data[first + at % (len(data) - first)] = byte
    try:
        list(read(DefaultRecordBatch(data)))
    except CorruptRecordError:
        return


def test_a_name_that_leads_back_to_its_own_beginning_ends() -> None:
    back, many = varint(-2), varint(2**40)
    record = b"\x00\x00\x00" + varint(-1) + varint(-1) + many + back
    data = batch([(None, None, [])], 0)
    del data[DefaultRecordBatch.HEADER_STRUCT.size :]
    with pytest.raises(CorruptRecordError):
        list(read(DefaultRecordBatch(data + varint(len(record)) + record)))


def test_a_fetch_begins_at_its_offset_and_goes_on_behind_what_was_compacted_away() -> None:
    first = changed(batch([(b"a", b"1", []), (b"b", b"2", []), (b"c", b"3", [])], 0), 0, 10)
    second = batch([(b"d", b"4", [])], 0)
    struct.pack_into(">i", second, struct.calcsize(">qiibIh"), 7)  # its last offset is 20 + 7; of eight one is left
    records = fetched(first + changed(second, 0, 20), offset=11)
    assert [(r.offset, r.key) for r in records.take(1)] == [(11, b"b")]
    assert records.next_fetch_offset == 12
    assert [(r.offset, r.value) for r in records.take(9)] == [(12, b"3"), (20, b"4")]
    assert records.next_fetch_offset == 28
    assert not records


def test_the_end_of_a_transaction_is_nobodys_message() -> None:
    control = changed(batch([(b"\x00\x00\x00\x01", b"", [])], 0), DefaultRecordBatch.CONTROL_MASK, 1)
    records = fetched(changed(batch([(b"a", b"1", [])], 0), 0) + control)
    assert [r.key for r in records.take()] == [b"a"]
    assert records.next_fetch_offset == 2


def test_a_flipped_bit_is_no_message() -> None:
    data = batch([(b"a", b"1" * 100, [])], 0)
    data[-9] ^= 1
    with pytest.raises(CorruptRecordError, match="not as it was written"):
        fetched(bytes(data)).take()


def test_the_format_before_headers_is_read() -> None:
    builder = LegacyRecordBatchBuilder(1, 0, 1 << 16)
    builder.append(0, timestamp=1, key=b"k", value=b"v")
    assert fetched(bytes(builder.build())).take() == [Record(0, b"k", b"v", {})]
