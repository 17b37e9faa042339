"""Messages to bytes and back.

Invariants:
- The bytes are JSON; the header `schema` says `<topic>/<major>.<minor>`. Readers ignore unknown fields of the same
  major and refuse another major: the caller buries the delivery, its bytes untouched. The headers `time` and
  `traceparent` (shared.contracts.tracing) are for people and metrics alone; nothing is decided by them.
- No text of a message holds NUL: every reader sees U+2400 in its place (`shared.storable`). The ledger could not keep it.
- No message exceeds 64 KiB when encoded; the producer refuses it. Bulk goes by claim check (`Ref`).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from shared import storable
from shared.contracts.topics import Topic
from shared.contracts.tracing import TRACE_HEADER, traceparent

MAJOR, MINOR = 1, 0
MAX_BYTES = 64 * 1024
SCHEMA_HEADER = "schema"
TIME_HEADER = "time"  # of encoding: Unix seconds, by the producer's clock


class Raw(msgspec.Struct, frozen=True):
    """Bytes and headers as they are: what a dead-letter topic carries, and how a message is forwarded untouched.
    A topic that carries `Raw` alone is neither decoded nor checked."""

    data: bytes
    headers: dict[str, str]


class UnreadableMessage(ValueError):
    """The bytes are no message of this topic; the text says why. Retrying cannot help: dead-letter it."""


class MessageTooLarge(ValueError):
    """The producer tried to send more than 64 KiB; bulk belongs into the object store."""


def sent_at(headers: Mapping[str, str]) -> float:
    """Unix seconds by the sender's clock; 0: it did not say."""
    try:
        at = float(headers.get(TIME_HEADER, "0"))
    except ValueError:
        return 0.0
    return at if math.isfinite(at) and at > 0 else 0.0


@functools.cache
def _decoder(types: tuple[type[msgspec.Struct], ...]) -> msgspec.json.Decoder[Any]:
    union: Any = types[0]
    for extra in types[1:]:
        union = union | extra
    return msgspec.json.Decoder(union)


@functools.cache
def _schema(topic: str) -> str:
    return f"{topic}/{MAJOR}.{MINOR}"


@functools.lru_cache(maxsize=256)  # the same few in every message; bounded, for anybody may write anything
def _major(schema: str) -> int | None:
    try:
        return int(schema.rsplit("/", 1)[1].split(".")[0])
    except (IndexError, ValueError):
        return None


def encode(topic: Topic, message: msgspec.Struct) -> tuple[bytes, dict[str, str]]:
    """Returns (bytes, headers). Raises TypeError for a foreign type and MessageTooLarge above 64 KiB."""
    if not isinstance(message, topic.types):
        allowed = ", ".join(t.__name__ for t in topic.types)
        raise TypeError(f"topic {topic.name} carries {allowed}, not {type(message).__name__}")
    if isinstance(message, Raw):
        data, headers = message.data, message.headers
    else:
        data, headers = (
            storable.to_json(message),
            {
                SCHEMA_HEADER: _schema(topic.name),
                TIME_HEADER: f"{time.time():.3f}",
                TRACE_HEADER: traceparent(message),
            },
        )
    if len(data) > MAX_BYTES:
        raise MessageTooLarge(
            f"{type(message).__name__} for {topic.name} is {len(data)} bytes; at most {MAX_BYTES}: send a Ref instead"
        )
    return data, headers


def decode(topic: Topic, data: bytes, headers: dict[str, str]) -> Any:
    """Returns the message. Raises UnreadableMessage with the reason."""
    if topic.types == (Raw,):
        return Raw(data, headers)
    schema = headers.get(SCHEMA_HEADER, "")
    if (major := _major(schema)) is None:
        raise UnreadableMessage(f"header {SCHEMA_HEADER!r} is {schema!r}, expected '<topic>/<major>.<minor>'")
    if major != MAJOR:
        raise UnreadableMessage(f"schema {schema!r}: this reader knows major {MAJOR}")
    if len(data) > MAX_BYTES:
        raise UnreadableMessage(f"{len(data)} bytes; at most {MAX_BYTES}")
    try:
        return _decoder(topic.types).decode(storable.without_nul(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableMessage(f"{topic.name}: {error}") from None
