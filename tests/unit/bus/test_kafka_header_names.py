"""Records of other programs: whatever their headers are called, they are read, and everything else of them is as it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kafka.errors import CorruptRecordError
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

import shared.bus.kafka_clients  # noqa: F401  (it sees to the names)


class Name(str):
    """Written as these bytes, which need not be text."""

    data: bytes

    def encode(self, *_: object) -> bytes:
        return self.data


def name(data: bytes) -> Name:
    made = Name("x" * len(data))
    made.data = data
    return made


Record = tuple[bytes | None, bytes | None, list[tuple[bytes, bytes]]]
RECORD = st.tuples(
    st.none() | st.binary(max_size=9),
    st.none() | st.binary(max_size=300),
    st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=4),
)


def batch(records: list[Record], compression: int) -> bytearray:
    builder = DefaultRecordBatchBuilder(2, compression, False, -1, -1, -1, 1 << 20)
    for offset, (key, value, headers) in enumerate(records):
        builder.append(offset, 0, key, value, [(name(told), said) for told, said in headers])
    return bytearray(builder.build())


def shown(told: bytes) -> str:
    try:
        return told.decode()
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else "?" for byte in told)


@given(st.lists(RECORD, min_size=1, max_size=5), st.sampled_from([0, 4]))
def test_any_name_is_read_and_nothing_else_changes(records: list[Record], compression: int) -> None:
    read = DefaultRecordBatch(batch(records, compression))
    assert read.validate_crc()
    assert [(r.offset, r.key, r.value, r.headers) for r in read] == [
        (offset, key, value, [(shown(told), said) for told, said in headers])
        for offset, (key, value, headers) in enumerate(records)
    ]


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_record_is_told_as_such_and_nothing_worse(at: int, byte: int) -> None:
    data = batch([(b"k", b"value" * 9, [(b"na\xff\xc3me", b"v"), (b"\xfe", b"w")])] * 2, 0)
    first = 61  # behind the batch's own header
    data[first + at % (len(data) - first)] = byte
    try:
        list(DefaultRecordBatch(data))
    except CorruptRecordError:
        return


def test_a_name_that_is_text_is_left_alone() -> None:
    (record,) = DefaultRecordBatch(batch([(None, b"", [("näme".encode(), b"")])], 0))
    assert record.headers == [("näme", b"")]
