"""Spans: what was done for an attempt, where, and for how long (docs/tracing.md). The services see this module alone.

Off unless `start` was called (`ETUDE_TRACES`): then no SDK is imported, and everything here returns at once.

Invariants
- A span about an attempt or a group lies in the trace that their messages name (shared.contracts.tracing): `etude trace` and
  the tracing UI speak of the same id. Whether such a trace is kept depends on that id alone, so that every service decides
  alike and an attempt is whole.
- The span of an attempt has an id that anybody can compute (`Place.of`). What is said of the attempt hangs below it and a
  training step links to it, although nothing was handed on.
- What a run does as a whole is little and always kept. A step has a trace of its own, which the messages about its version
  carry: in the run's trace, hours long, nobody would find it.
- Nothing is decided by a span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec
import xxhash

from shared.contracts.topics import Topic
from shared.contracts.tracing import trace_id
from shared.settings import Told

if TYPE_CHECKING:
    from shared.bus import Delivery
    from shared.telemetry_otel import Tracing

Fact = str | int | float | bool
Kind = Literal["internal", "client", "server"]
_TELLING = (
    "run", "attempt", "epoch", "group", "problem", "step", "serial", "incarnation", "eval", "action", "stop", "reward"
)  # fmt: skip
_PLAIN = (str, int, float)
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")


class Place(NamedTuple):
    """A span among all: its trace's id and its own, both above 0."""

    trace: int
    span: int

    @staticmethod
    def read(header: str) -> Place | None:
        """Of a W3C `traceparent`; None where it is none, or says that nothing is recorded. Anybody may write a header."""
        match = _TRACEPARENT.fullmatch(header)
        place = Place(int(match[1], 16), int(match[2], 16)) if match else None
        return place if place and place.trace and place.span else None

    @staticmethod
    def of(attempt: str, epoch: int) -> Place:
        """Of this life of an attempt, at the worker that has it."""
        return Place(int(trace_id(attempt), 16), xxhash.xxh3_64_intdigest(f"{attempt}/{epoch}".encode()) or 1)

    @property
    def header(self) -> str:
        return f"00-{self.trace:032x}-{self.span:016x}-01"


class Span(Protocol):
    """Used by `with`: lasts as long as the block, and spans that are made in it hang below. An exception that leaves the block
    is noted as its failure, a cancellation as that."""

    def note(self, **facts: Fact) -> None: ...

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Sending(Protocol):
    """Used by `with`, around what makes the messages durable."""

    def message(self, topic: Topic, key: str, message: msgspec.Struct, data: bytes, headers: dict[str, str]) -> None:
        """One that goes out. May change `headers`, before they are written."""

    def __enter__(self) -> Sending: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Nothing:
    """Both of them where nothing is recorded."""

    __slots__ = ()

    def note(self, **facts: Fact) -> None:
        pass

    def message(self, topic: Topic, key: str, message: msgspec.Struct, data: bytes, headers: dict[str, str]) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        pass


NOTHING = _Nothing()
_tracing: Tracing | None = None


def require_sdk(share: float) -> None:
    """Raise Told where the SDK that records a `share` above 0 is not installed."""
    try:
        import shared.telemetry_export
        import shared.telemetry_otel  # noqa: F401
    except ImportError as error:
        raise Told(
            f"traces (ETUDE_TRACES): found {share:g}, and the OpenTelemetry SDK is missing ({error}): "
            "pip install 'etude[traces]', or unset it"
        ) from None


def start(service: str, name: str, share: float, bus: str) -> None:
    """Once per process. `share` of the attempts is recorded; `bus`: what carries the messages, "kafka" or "sqlite". Raises
    Told where the SDK is not installed, or where one of its variables says what it cannot do."""
    global _tracing
    require_sdk(share)
    from shared.telemetry_export import otlp
    from shared.telemetry_otel import Tracing

    _tracing = Tracing(otlp(), service=service, name=name, share=share, bus=bus)


def span(name: str, carried: Mapping[str, str] | None = None, *, kind: Kind = "internal", **facts: Fact) -> Span:
    """Below the span in whose block it is made, or below the one that was `carried` here. Nothing where there is none."""
    return NOTHING if _tracing is None else _tracing.span(name, carried, kind, facts)


def span_for(name: str, delivery: Delivery, *, place: Place | None = None, **facts: Fact) -> Span:
    """What a message asks for: below its sending, and at `place` where others must find it."""
    return NOTHING if _tracing is None else _tracing.span_for(name, delivery, place, facts)


def span_about(name: str, subject: str, *, links: Iterable[Place] = (), **facts: Fact) -> Span:
    """In the trace of its own subject, below nothing. `links`: to what it is made of; read only where traces are on."""
    return NOTHING if _tracing is None else _tracing.span_about(name, subject, links, facts)


def carry() -> dict[str, str]:
    """Headers for a request or a job that others work on, so that their spans hang below this one. Empty: nothing to carry."""
    return {} if _tracing is None else _tracing.carry()


def sending() -> Sending:
    """For the bus's adapters."""
    return NOTHING if _tracing is None else _tracing.sending()


def processed(delivery: Delivery, group: str | None, since_ns: int, buried: str | None = None) -> None:
    """For the bus: a member of `group` has answered what it took at `since_ns` (Unix time). Who reads a topic from its start
    has no part in the flow, and reads the same again at every start."""
    if _tracing is not None and group is not None:
        _tracing.processed(delivery, group, since_ns, buried)


def facts_of(message: Any) -> dict[str, Fact]:
    """What of a message tells its span from others."""
    found: dict[str, Fact] = {}
    for part in (message, getattr(message, "key", None)):
        for name in _TELLING:
            if isinstance(value := getattr(part, name, None), _PLAIN):
                found[name] = value
    return found
