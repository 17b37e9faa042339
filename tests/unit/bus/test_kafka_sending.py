"""What is handed to Kafka's producer is sent: its sender is woken after every so many, and in any case at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kafka.errors import MessageSizeTooLargeError

from shared.bus import BusUnavailable
from shared.bus.kafka import WAKE_EVERY, KafkaBus
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic

TOPIC = Topic("t", (Alert,), partitions=4)


class Sent:
    """As a record's future: durable when `then` is called."""

    def add_callback(self, then: Callable[[object], None]) -> None:
        self.then = then

    def add_errback(self, otherwise: Callable[[BaseException], None]) -> None:
        self.otherwise = otherwise


class Producer:
    """Notes what it is given and when it is woken; from the `fails`-th on it takes nothing."""

    def __init__(self, fails: int = 1 << 30, error: Exception | None = None) -> None:
        self.done: list[Any] = []
        self.fails, self.error = fails, error

    def put(self, topic: str, partition: int, key: bytes, value: bytes, headers: list[tuple[str, bytes]]) -> Sent:
        if self.error and len(self.sent) >= self.fails:
            raise self.error
        self.done.append(Sent())
        return self.done[-1]

    def wake(self) -> None:
        self.done.append("wake")

    @property
    def sent(self) -> list[Sent]:
        return [one for one in self.done if isinstance(one, Sent)]


def sending(producer: Producer, count: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    bus = KafkaBus("kafka://127.0.0.1:9", client="test")
    monkeypatch.setattr(bus, "_ensure", lambda topics: {topic.name for topic in topics})
    monkeypatch.setattr(bus, "_open_producer", lambda: producer)
    return bus.send([(TOPIC, str(i), b"{}", {"h": "v"}) for i in range(count)])


@pytest.mark.parametrize("count", [1, WAKE_EVERY - 1, WAKE_EVERY, 3 * WAKE_EVERY + 1])
def test_the_sender_is_woken_in_time_and_last_of_all(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer()
    finished = sending(producer, count, monkeypatch)
    assert producer.done[-1] == "wake"
    unwoken = "".join("w" if one == "wake" else "." for one in producer.done).split("w")
    assert max(map(len, unwoken)) <= WAKE_EVERY
    for sent in producer.sent[:-1]:
        sent.then(None)
    assert not finished.done()
    producer.sent[-1].then(None)
    assert finished.result(0) is None


def test_what_was_handed_over_goes_where_a_later_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer(fails=3, error=MessageSizeTooLargeError("too large"))
    finished = sending(producer, 9, monkeypatch)
    assert (len(producer.sent), producer.done[-1]) == (3, "wake")
    with pytest.raises(BusUnavailable, match="too large"):
        finished.result(0)

    producer = Producer(fails=2, error=UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no text"))
    with pytest.raises(UnicodeEncodeError):
        sending(producer, 9, monkeypatch)
    assert (len(producer.sent), producer.done[-1]) == (2, "wake")
