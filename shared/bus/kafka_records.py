"""A Kafka record as a delivery, and a buried delivery as a letter. Pure.

Anybody may write to a topic: no record, whatever it holds, raises here, and every letter is one that a producer takes.
"""

from __future__ import annotations

import xxhash

from shared.bus.inbox import Inbox, Lease, Received
from shared.bus.kafka_batches import Record
from shared.contracts import codec

LETTER_BYTES = 900_000  # of a dead letter: below a producer's and a broker's usual 1 MiB, headers and key counted
LEAST_LETTER_BYTES = 1_000  # a topic that does not take this takes none of our messages
SIDES = 18  # this part of a letter that is cut (50,000 bytes) is its key's, and as much all its headers'
REASON_BYTES = 4_000  # it may repeat what could not be read
HEADER_OVERHEAD = 16  # of every header beside its name and value: their lengths, at most


def received(inbox: Inbox, lease: Lease, record: Record) -> tuple[Received, str]:
    """(the delivery, why it cannot be read; "": it can)."""
    key, data = record.key, record.value or b""
    item = Received(
        inbox, lease, key.decode("utf-8", "replace") if key else "", None, record.headers, record.offset, data
    )
    try:
        item.message = codec.decode(lease.topic, data, record.headers)
    except codec.UnreadableMessage as error:
        return item, str(error)
    except Exception as error:  # to let it out would end the consumer, and the next one would meet the same record
        return item, f"{type(error).__name__}: {error}"
    return item, ""


def letter(
    item: Received, reason: str, group: str | None, most: int = LETTER_BYTES
) -> tuple[str, bytes, dict[str, str]]:
    """(key, data, headers) of the dead letter: the delivery's own and the two that say why, cut to `most` bytes, which the
    topic takes. `dead-letter-cut` then says what they were."""
    side = most // SIDES
    ours = {
        "dead-letter-reason": _cut(reason, min(REASON_BYTES, most // 4)),
        "dead-letter-source": f"{item.topic.name}/{item.lease.partition}:{item.offset}/{group or ''}",
    }
    key, data, headers = item.key, item.data, item.headers
    key_bytes, headers_bytes = _size(key), _size_of(headers)
    if key_bytes + len(data) + headers_bytes <= most:
        return key, data, headers | ours
    # Of a foreign producer: the broker took it compressed or without our headers, and takes no more from us.
    was = [f"{len(data)} bytes, xxh3-128 {xxhash.xxh3_128_hexdigest(data)}"]
    if key_bytes > side:
        key = _cut(key, side)
        was.append(f"key: {key_bytes} bytes")
    if headers_bytes > side:
        was.append(f"headers: {len(headers)}, {headers_bytes} bytes")
        headers = _first(headers, side)
    data = data[: max(0, most - _size(key) - _size_of(headers))]
    return key, data, headers | ours | {"dead-letter-cut": "; ".join(was)}


def _first(headers: dict[str, str], room: int) -> dict[str, str]:
    """As many as fit, the smallest first: one that is huge hides none of the others."""
    kept = {}
    for name, value in sorted(headers.items(), key=lambda pair: _size_of(dict([pair]))):
        room -= _size_of({name: value})
        if room < 0:
            break
        kept[name] = value
    return kept


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _size_of(headers: dict[str, str]) -> int:
    return sum(_size(name) + _size(value) + HEADER_OVERHEAD for name, value in headers.items())


def _cut(text: str, most: int) -> str:
    """At most `most` bytes of UTF-8, and nothing that is none."""
    return text.encode("utf-8", "replace")[:most].decode("utf-8", "ignore")
