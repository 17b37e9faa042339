"""The OpenTelemetry SDK behind `shared.telemetry_spans`: imported where traces are on, and nowhere else."""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from shared.bus import Delivery
from shared.contracts.codec import Raw
from shared.contracts.messages import AttemptHeartbeat
from shared.contracts.topics import ROLLOUTS_REQUESTED, Topic
from shared.contracts.tracing import TRACE_HEADER, subject, trace_id
from shared.telemetry_spans import NOTHING, Fact, Kind, Place, Sending, Span, facts_of

KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT, "server": SpanKind.SERVER}
UNTRACED = (AttemptHeartbeat, Raw)  # of the first there is one a worker every few seconds; the second was sent before
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
LOW = 2**64 - 1
TEXT = 300  # characters of a reason


class Tracing:
    """`share`: of the traces of attempts and groups, by their ids as the SDK's TraceIdRatioBased has it. That sampler itself
    would not do: it would keep or drop all the steps of a run together, since a run is one subject."""

    def __init__(self, spans: SpanProcessor, *, service: str, name: str, share: float, bus: str) -> None:
        ours = {
            "service.namespace": "etude",
            "service.name": service,
            "service.instance.id": name,
            "service.version": importlib.metadata.version("etude"),
        }
        resource = Resource.create(ours).merge(OTELResourceDetector().detect())  # who sets OTEL_… means it
        self._ids = _Ids()
        provider = TracerProvider(ALWAYS_ON, resource, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(spans)
        self._tracer = provider.get_tracer("etude")
        self._below = round(share * 2**64)
        self._bus = bus

    def span(self, name: str, carried: Mapping[str, str] | None, kind: Kind, facts: Mapping[str, Fact]) -> Span:
        if carried is not None:
            parent = Place.read(carried.get(TRACE_HEADER, ""))
            return NOTHING if parent is None else _Span(self._begin(name, facts, below=parent, kind=KINDS[kind]))
        if not trace.get_current_span().is_recording():
            return NOTHING
        return _Span(self._tracer.start_span(name, kind=KINDS[kind], attributes=_named(facts)))

    def span_for(self, name: str, delivery: Delivery, place: Place | None, facts: Mapping[str, Fact]) -> Span:
        parent = Place.read(delivery.headers.get(TRACE_HEADER, ""))
        if parent is None or not self._keeps(delivery.message, parent):
            return NOTHING
        return _Span(self._begin(name, {**facts_of(delivery.message), **facts}, below=parent, at=place))

    def span_about(self, name: str, about: str, links: Iterable[Place], facts: Mapping[str, Fact]) -> Span:
        return _Span(self._begin(name, facts, at=Place(int(trace_id(about), 16), 0), links=self._kept(links)))

    def carry(self) -> dict[str, str]:
        current = trace.get_current_span()
        return {TRACE_HEADER: _place(current).header} if current.is_recording() else {}

    def sending(self) -> Sending:
        return _Sending(self)

    def processed(self, delivery: Delivery, group: str, since_ns: int, buried: str | None) -> None:
        message, topic = delivery.message, delivery.topic.name
        parent = Place.read(delivery.headers.get(TRACE_HEADER, ""))
        if parent is None or isinstance(message, UNTRACED) or not self._keeps(message, parent):
            return
        attributes = self._messaging("process", topic) | {
            "messaging.consumer.group.name": group,
            "messaging.kafka.offset" if self._bus == "kafka" else "etude.offset": delivery.offset,
        }
        span = self._begin(
            f"process {topic}", _telling(message), below=parent, kind=SpanKind.CONSUMER, also=attributes, since=since_ns
        )
        if buried is not None:
            span.set_status(Status(StatusCode.ERROR, f"buried: {buried}"[:TEXT]))
        span.end()

    def sent(
        self, topic: Topic, key: str, message: msgspec.Struct, data: bytes, headers: dict[str, str]
    ) -> trace.Span | None:
        """The span that a message is: with the ids that its `traceparent` has. What a run says while something is done
        takes that work's trace along instead."""
        own = Place.read(headers.get(TRACE_HEADER, ""))
        if own is None or isinstance(message, UNTRACED) or not self._keeps(message, own):
            return None
        current = trace.get_current_span()
        working = _place(current) if current.is_recording() else None
        attempt, below, links = getattr(message, "key", None), None, self._kept(_members(message))
        if working and (working.trace == own.trace or _of_the_run(message)):
            below, own = working, Place(working.trace, own.span)
            headers[TRACE_HEADER] = own.header
        else:
            if attempt is not None and topic.name != ROLLOUTS_REQUESTED.name:
                below = Place.of(attempt.attempt, attempt.epoch)
            if working:
                links.append(working)
        attributes = self._messaging("send", topic.name) | {
            "messaging.kafka.message.key" if self._bus == "kafka" else "etude.key": key,
            "messaging.message.body.size": len(data),
        }
        name, facts = f"send {topic.name}", _telling(message)
        return self._begin(name, facts, below=below, at=own, links=links, kind=SpanKind.PRODUCER, also=attributes)

    def _keeps(self, message: object, place: Place) -> bool:
        return place.trace & LOW < self._below or _of_the_run(message)

    def _kept(self, places: Iterable[Place]) -> list[Place]:
        """Those of attempts that are recorded: a link to nothing helps nobody."""
        return [place for place in places if place.trace & LOW < self._below]

    def _messaging(self, operation: str, topic: str) -> dict[str, Fact]:
        return {
            "messaging.system": self._bus,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
            "messaging.destination.name": topic,
        }

    def _begin(
        self,
        name: str,
        facts: Mapping[str, Fact],
        *,
        below: Place | None = None,
        at: Place | None = None,
        links: Iterable[Place] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        also: Mapping[str, Fact] | None = None,
        since: int | None = None,
    ) -> trace.Span:
        """`at`: the ids that it gets; a span of 0: any. `also`: attributes that are not ours."""
        attributes = _named(facts) | dict(also or {})
        with self._ids.told(at):
            found = [Link(_context(link)) for link in links]
            return self._tracer.start_span(name, _parent(below), kind, attributes, found, since)


class _Ids(RandomIdGenerator):
    """Those that were told, for what this thread begins next."""

    def __init__(self) -> None:
        self._next = threading.local()

    def told(self, place: Place | None) -> _Ids:
        self._next.place = place
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._next.place = None

    def generate_trace_id(self) -> int:
        place = getattr(self._next, "place", None)
        return place.trace if place else super().generate_trace_id()

    def generate_span_id(self) -> int:
        place = getattr(self._next, "place", None)
        return place.span if place and place.span else super().generate_span_id()

    def is_trace_id_random(self) -> bool:
        return False


class _Span:
    __slots__ = ("_span", "_token")

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def note(self, **facts: Fact) -> None:
        self._span.set_attributes(_named(facts))

    def __enter__(self) -> _Span:
        self._token = attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        detach(self._token)
        _end(self._span, error)


class _Sending:
    __slots__ = ("_spans", "_tracing")

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._spans: list[trace.Span] = []

    def message(self, topic: Topic, key: str, message: msgspec.Struct, data: bytes, headers: dict[str, str]) -> None:
        span = self._tracing.sent(topic, key, message, data, headers)
        if span is not None:
            self._spans.append(span)

    def __enter__(self) -> _Sending:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for span in self._spans:
            _end(span, error)


def _end(span: trace.Span, error: BaseException | None) -> None:
    if isinstance(error, Exception):
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"[:TEXT]))
    elif error is not None:
        span.set_attribute("etude.cancelled", True)
    span.end()


def _of_the_run(message: object) -> bool:
    return isinstance(message, msgspec.Struct) and subject(message) == getattr(message, "run", None)


def _members(message: object) -> list[Place]:
    """The attempts that a complete group consists of."""
    return [Place.of(member.attempt, member.epoch) for member in getattr(message, "members", ())]


def _telling(message: object) -> dict[str, Fact]:
    found = facts_of(message) | {"message": type(message).__name__}
    if reason := getattr(message, "reason", ""):
        found["reason"] = str(reason)[:TEXT]
    return found


def _named(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    return {f"etude.{name}": value for name, value in facts.items()}


def _place(span: trace.Span) -> Place:
    context = span.get_span_context()
    return Place(context.trace_id, context.span_id)


def _context(place: Place) -> SpanContext:
    return SpanContext(place.trace, place.span, is_remote=True, trace_flags=SAMPLED)


def _parent(place: Place | None) -> Context:
    """The context with this span in it, or an empty one: below nothing."""
    return Context() if place is None else trace.set_span_in_context(NonRecordingSpan(_context(place)), Context())
