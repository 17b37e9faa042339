"""Which trace a message belongs to: W3C `traceparent`, so that one attempt can be followed through every topic and log.

Invariants
- The trace id is a pure function of what the message is about: its attempt, else its group, else its run. Nothing has to
  be handed on, so a crash, an outbox, a redelivery or a replay cannot lose it, and `grep` finds all logs of an attempt.
  (With OpenTelemetry on, what is said of a run within a training step carries the step's: `shared.telemetry_spans`.)
- It is for people and tools alone; nothing is decided by it. Dead letters and forwarded messages keep their own.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec
import xxhash

from shared import storable

TRACE_HEADER = "traceparent"
_spans = random.Random()  # of the operating system's entropy; only to tell messages of one trace apart


@functools.lru_cache(maxsize=4096)  # an attempt has some messages and a few lines of log, a run very many
def trace_id(subject: str) -> str:
    """32 hexadecimal digits, never all zero. `subject`: an attempt's, group's or run's id."""
    return f"{xxhash.xxh3_128_intdigest(storable.text(subject).encode()) or 1:032x}"


def subject(message: msgspec.Struct) -> str:
    """The id of what the message is about, the most particular one."""
    key = getattr(message, "key", None)
    named: Any = getattr(key, "attempt", None) or getattr(message, "attempt", None) or getattr(message, "group", None)
    return str(named or getattr(message, "run", ""))


def traceparent(message: msgspec.Struct) -> str:
    """`00-<trace id>-<span id>-01`; the span is the message."""
    return f"00-{trace_id(subject(message))}-{_spans.getrandbits(64) or 1:016x}-01"
