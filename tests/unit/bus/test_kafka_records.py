"""Whatever stands in a Kafka record, it becomes a delivery or a letter that the producer takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder

from shared.bus.inbox import Inbox, Lease, Received
from shared.bus.kafka_batches import Record
from shared.bus.kafka_records import letter, received
from shared.contracts import codec
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic

TOPIC = Topic("t", (Alert,), partitions=4)
PRODUCER_TAKES = 1_048_576  # KafkaProducer's max_request_size
GOOD, HEADERS = codec.encode(TOPIC, Alert(run="r", name="n", severity="info", what="w"))


def record(key: bytes | None = b"k", value: bytes | None = GOOD, headers: dict[str, str] | None = None) -> Record:
    return Record(7, key, value, HEADERS if headers is None else headers)


def read(found) -> tuple[Received, str]:
    return received(Inbox(1, lambda: None), Lease(TOPIC, 2, 7), found)


def weight(key: str, data: bytes, headers: dict[str, str]) -> int:
    pairs = [(name, value.encode()) for name, value in headers.items()]
    return DefaultRecordBatchBuilder.estimate_size_in_bytes(key.encode(), data, pairs)


optional = st.none() | st.binary(max_size=20)


@given(optional, optional, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=4))
def test_any_record_is_a_delivery_or_a_letter(key, value, headers):
    item, unreadable = read(record(key, value, headers))
    assert (item.message is None) == bool(unreadable)
    assert item.data == (value or b"")


def test_an_error_that_nobody_foresaw_buries_that_one_record(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("how?")

    monkeypatch.setattr(codec, "decode", broken)
    item, unreadable = read(record())
    assert (unreadable, item.data, item.key) == ("ZeroDivisionError: how?", GOOD, "k")


def test_a_letter_of_usual_size_is_the_delivery_and_why():
    item, _ = read(record())
    key, data, headers = letter(item, "no", "g")
    assert (key, data) == ("k", GOOD)
    assert headers == HEADERS | {"dead-letter-reason": "no", "dead-letter-source": "t/2:7/g"}


LARGE = {
    "value": record(value=b"v" * 2_000_000),
    "key": record(key=b"k" * 2_000_000),
    "key of no UTF-8": record(key=b"\xff" * 1_000_000),
    "a header": record(headers={"schema": "s" * 2_000_000, "small": "1"}),
    "a header's name": record(headers={"s" * 2_000_000: "", "small": "1"}),
    "headers": record(headers={f"h{i}": "" for i in range(200_000)}),
    "all": record(b"k" * 600_000, b"v" * 600_000, {"h": "h" * 600_000}),
    "just below": record(b"k" * 400_000, b"v" * 499_000, {}),
}


@pytest.mark.parametrize("large", LARGE)
def test_the_letter_of_a_large_record_is_one_that_the_producer_takes(large):
    item, unreadable = read(LARGE[large])
    key, data, headers = letter(item, unreadable or "no", "g")
    assert weight(key, data, headers) < PRODUCER_TAKES
    assert headers["dead-letter-reason"]
    assert headers["dead-letter-source"] == "t/2:7/g"
    assert ("dead-letter-cut" in headers) == (large != "just below")
    if ("small", b"1") in LARGE[large].headers:
        assert headers["small"] == "1"
    if len(item.data) < 10_000:
        assert data == item.data


def test_a_reason_that_is_no_text_can_be_sent():
    item, _ = read(record())
    _, _, headers = letter(item, "\ud800" + "x" * 1_000_000, "g")
    assert len(headers["dead-letter-reason"].encode()) <= 4_000
