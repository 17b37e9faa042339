"""Spans as the SDK records them: whose trace, below what, which are kept; and that a collector which is away costs nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from shared import bus as buses
from shared import telemetry_export as export
from shared import telemetry_spans as spans
from shared.bus import Bus
from shared.contracts import topics
from shared.contracts.messages import (
    Alert,
    AttemptClaimed,
    AttemptHeartbeat,
    AttemptKey,
    GroupMember,
    GroupQuarantined,
    GroupReady,
    PolicyPublished,
    RolloutRequested,
)
from shared.contracts.run import Ref, Sampling
from shared.contracts.tracing import TRACE_HEADER, trace_id
from shared.settings import Told
from shared.telemetry_otel import Tracing
from tests.patience import patient

RUN, REF = "r-test", Ref(key="k", size=1, checksum="0" * 32)


@dataclass
class Recorded:
    memory: InMemorySpanExporter

    def all(self, name: str = "") -> list[ReadableSpan]:
        return [span for span in self.memory.get_finished_spans() if name in ("", span.name)]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.all(name)
        return found

    @property
    def names(self) -> list[str]:
        return sorted(span.name for span in self.all())


Start = Callable[..., Recorded]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def begin(share: float = 1.0) -> Recorded:
        memory = InMemorySpanExporter()
        tracing = Tracing(SimpleSpanProcessor(memory), service="test", name="test-1", share=share, bus="sqlite")
        monkeypatch.setattr(spans, "_tracing", tracing)
        return Recorded(memory)

    return begin


def request(attempt: str = "a-1", epoch: int = 0) -> RolloutRequested:
    key = AttemptKey(attempt=attempt, epoch=epoch, group="g-1", problem="p")
    return RolloutRequested(
        run=RUN, key=key, policy_floor=0, reward_config="default", sampling=Sampling(), pack=REF, pack_hidden=REF
    )


def ready(*attempts: str) -> GroupReady:
    members = [GroupMember(attempt=a, epoch=0, trajectory=REF, reward=1.0, oldest_version=0) for a in attempts]
    return GroupReady(run=RUN, group="g-1", problem="p", sequence=1, members=members)


def ids(span: ReadableSpan) -> tuple[str, str]:
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def below(span: ReadableSpan) -> str | None:
    return f"{span.parent.span_id:016x}" if span.parent else None


def play(tmp_path: Path, scenario: Callable[[Bus], Any]) -> Any:
    async def whole() -> Any:
        bus = buses.connect(f"sqlite:{tmp_path / 'bus.db'}", client="test")
        try:
            async with asyncio.timeout(30):
                return await scenario(bus)
        finally:
            await bus.close()

    return asyncio.run(whole())


def test_what_is_done_for_an_attempt_is_one_trace_with_the_id_that_its_messages_have(
    start: Start, tmp_path: Path
) -> None:
    recorded, key = start(), request().key

    async def scenario(bus: Bus) -> str:
        await bus.publish(topics.ROLLOUTS_REQUESTED, "a-1", request())
        delivery = await anext(aiter(bus.deliveries([topics.ROLLOUTS_REQUESTED], "rollout", 1)))
        with spans.span_for("attempt", delivery, place=spans.Place.of("a-1", 0)):
            with spans.span("claim"):
                claim = AttemptClaimed(run=RUN, key=key, worker="w")
                await asyncio.create_task(bus.publish(topics.ATTEMPTS_PROGRESS, "a-1", claim))
            delivery.done()
            carried = spans.carry()
        with spans.span("sample", carried, kind="server") as said:  # elsewhere
            said.note(tokens=3)
        return delivery.headers[TRACE_HEADER]

    header = play(tmp_path, scenario)
    assert {ids(span)[0] for span in recorded.all()} == {trace_id("a-1")}
    sent, taken = recorded.one("send rollouts.requested"), recorded.one("process rollouts.requested")
    attempt, claim = recorded.one("attempt"), recorded.one("claim")
    assert header == f"00-{ids(sent)[0]}-{ids(sent)[1]}-01"  # the message is the span
    assert below(sent) is None
    assert below(taken) == below(attempt) == ids(sent)[1]
    assert ids(attempt)[1] == f"{spans.Place.of('a-1', 0).span:016x}"
    assert below(claim) == ids(attempt)[1]
    assert below(recorded.one("send attempts.progress")) == ids(claim)[1]
    assert below(recorded.one("sample")) == ids(attempt)[1]
    assert (sent.kind, taken.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    for span, operation in ((sent, "send"), (taken, "process")):
        assert span.attributes is not None
        assert span.attributes["messaging.system"] == "sqlite"
        assert span.attributes["messaging.destination.name"] == "rollouts.requested"
        assert span.attributes["messaging.operation.type"] == operation
        assert span.attributes["etude.attempt"] == "a-1"
        assert span.attributes["etude.run"] == RUN
    assert taken.attributes is not None
    assert taken.attributes["messaging.consumer.group.name"] == "rollout"
    assert sent.resource.attributes["service.name"] == "test"


def test_what_is_said_of_an_attempt_hangs_below_it_although_nothing_was_handed_on(start: Start, tmp_path: Path) -> None:
    """An outbox publishes for many attempts, in the context of whichever came first."""
    recorded = start()

    async def scenario(bus: Bus) -> None:
        claims = [AttemptClaimed(run=RUN, key=request(name, 2).key, worker="w") for name in ("a-1", "a-2")]
        await bus.publish_many([(topics.ATTEMPTS_PROGRESS, claim.key.attempt, claim) for claim in claims])

    play(tmp_path, scenario)
    for span, name in zip(recorded.all("send attempts.progress"), ("a-1", "a-2"), strict=True):
        assert ids(span)[0] == trace_id(name)
        assert below(span) == f"{spans.Place.of(name, 2).span:016x}"


def test_an_attempt_is_recorded_as_a_whole_or_not_at_all(start: Start, tmp_path: Path) -> None:
    recorded, names = start(share=0.5), [f"a-{i}" for i in range(40)]

    async def scenario(bus: Bus) -> None:
        await bus.publish_many([(topics.ROLLOUTS_REQUESTED, name, request(name)) for name in names])
        deliveries = aiter(bus.deliveries([topics.ROLLOUTS_REQUESTED], "rollout", 64))
        for _ in names:
            delivery = await anext(deliveries)
            with spans.span_for("attempt", delivery), spans.span("generate"):
                pass
            delivery.done()

    play(tmp_path, scenario)
    of: dict[str, int] = {}
    for span in recorded.all():
        of[ids(span)[0]] = of.get(ids(span)[0], 0) + 1
    expected = {trace_id(name) for name in names if int(trace_id(name)[16:], 16) < 2**63}
    assert 5 < len(expected) < 35
    assert of == dict.fromkeys(expected, 4)


def test_a_step_has_a_trace_of_its_own_that_its_version_takes_along(start: Start, tmp_path: Path) -> None:
    """Also where hardly any attempt is recorded: of steps there are few."""
    recorded = start(share=1e-9)
    published = PolicyPublished(run=RUN, serial=3, incarnation=0, step=3, parent=2, manifest=REF)

    async def scenario(bus: Bus) -> None:
        with spans.span_about("training step", f"{RUN}/0/3", step=3):
            await bus.publish(topics.POLICIES_PUBLISHED, RUN, published)
        delivery = await anext(aiter(bus.deliveries([topics.POLICIES_PUBLISHED], None, 1)))
        delivery.done()
        with spans.span("swap", delivery.headers, serial=3):
            await bus.publish(topics.ALERTS, RUN, Alert(run=RUN, name="n", severity="info", what="w"))

    play(tmp_path, scenario)
    step, swap, sent = (recorded.one(name) for name in ("training step", "swap", "send policies.published"))
    assert {ids(span)[0] for span in recorded.all()} == {trace_id(f"{RUN}/0/3")}
    assert (below(step), below(sent), below(swap)) == (None, ids(step)[1], ids(sent)[1])
    assert below(recorded.one("send alerts")) == ids(swap)[1]


def test_a_step_and_a_group_are_linked_to_the_attempts_that_they_are_made_of(start: Start, tmp_path: Path) -> None:
    recorded, names = start(), ("a-1", "a-2", "a-3")
    places = [spans.Place.of(name, 0) for name in names]

    async def scenario(bus: Bus) -> None:
        await bus.publish(topics.GROUPS_READY, RUN, ready(*names))
        with spans.span_about("training step", f"{RUN}/0/1", links=places):
            await bus.publish(topics.GROUPS_QUARANTINED, RUN, GroupQuarantined(run=RUN, group="g-1", reason="why"))

    play(tmp_path, scenario)
    for name in ("training step", "send groups.ready"):
        links = [(link.context.trace_id, link.context.span_id) for link in recorded.one(name).links]
        assert links == [tuple(place) for place in places]
    assert ids(recorded.one("send groups.ready"))[0] == trace_id("g-1")
    other = recorded.one("send groups.quarantined")  # said within the step, about a group: in the group's trace
    assert ids(other)[0] == trace_id("g-1")
    assert [f"{link.context.span_id:016x}" for link in other.links] == [ids(recorded.one("training step"))[1]]


def test_links_lead_only_to_what_is_recorded(start: Start) -> None:
    recorded, names = start(share=0.5), [f"a-{i}" for i in range(40)]
    with spans.span_about("training step", f"{RUN}/0/1", links=[spans.Place.of(name, 0) for name in names]):
        pass
    linked = {f"{link.context.trace_id:032x}" for link in recorded.one("training step").links}
    assert linked == {trace_id(name) for name in names if int(trace_id(name)[16:], 16) < 2**63}


def test_heartbeats_retries_and_readers_of_the_whole_past_leave_no_span(start: Start, tmp_path: Path) -> None:
    recorded = start()

    async def scenario(bus: Bus) -> None:
        beat = AttemptHeartbeat(run=RUN, worker="w", attempts={"a-1": (0, -1)})
        await bus.publish(topics.ATTEMPTS_PROGRESS, "w", beat)
        await bus.publish(topics.ROLLOUTS_REQUESTED, "a-1", request())
        members = aiter(bus.deliveries([topics.ROLLOUTS_REQUESTED, topics.ATTEMPTS_PROGRESS], "rollout", 4))
        for _ in range(2):
            delivery = await anext(members)
            delivery.retry(60.0)
        reader = aiter(bus.deliveries([topics.ROLLOUTS_REQUESTED], None, 4))
        (await anext(reader)).done()

    play(tmp_path, scenario)
    assert recorded.names == ["send rollouts.requested"]


def test_a_message_that_is_buried_says_why(start: Start, tmp_path: Path) -> None:
    recorded = start()

    async def scenario(bus: Bus) -> None:
        await bus.publish(topics.ROLLOUTS_REQUESTED, "a-1", request())
        (await anext(aiter(bus.deliveries([topics.ROLLOUTS_REQUESTED], "rollout", 4)))).bury("no such problem")

    play(tmp_path, scenario)
    status = recorded.one("process rollouts.requested").status
    assert (status.status_code, status.description) == (StatusCode.ERROR, "buried: no such problem")


def test_a_failure_is_noted_and_a_cancellation_is_none(start: Start) -> None:
    recorded = start()

    async def scenario() -> None:
        with pytest.raises(OSError), spans.span_about("failing", "a"):
            raise OSError("the disk is full")
        with pytest.raises(asyncio.CancelledError), spans.span_about("cancelled", "a"):
            raise asyncio.CancelledError

    asyncio.run(scenario())
    failing, cancelled = recorded.one("failing"), recorded.one("cancelled")
    assert (failing.status.status_code, failing.status.description) == (StatusCode.ERROR, "OSError: the disk is full")
    assert cancelled.status.status_code is StatusCode.UNSET
    assert cancelled.attributes is not None
    assert cancelled.attributes["etude.cancelled"] is True


def test_a_span_with_nothing_to_hang_below_is_none(start: Start) -> None:
    recorded = start()
    with spans.span("generate"), spans.span("sample", {"traceparent": "nonsense"}), spans.span("sample", {}):
        assert spans.carry() == {}
    assert recorded.all() == []


class Collector(SpanExporter):
    """Takes nothing until it is `there`; with `hangs` it does not even answer."""

    def __init__(self) -> None:
        self.there, self.asked, self.hangs = threading.Event(), threading.Semaphore(0), False
        self.taken: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.asked.release()
        if self.hangs:
            self.there.wait(30)
        if not self.there.is_set():
            return SpanExportResult.FAILURE
        self.taken += spans
        return SpanExportResult.SUCCESS


def ended() -> dict[str, float]:
    names = ("delivered", "lost", "dropped")
    return {name: REGISTRY.get_sample_value("etude_traces_spans_total", {"outcome": name}) or 0.0 for name in names}


@pytest.fixture
def since() -> Callable[[], dict[str, float]]:
    before = ended()
    return lambda: {name: value - before[name] for name, value in ended().items() if value != before[name]}


def some_span() -> ReadableSpan:
    return ReadableSpan("one")


def test_a_collector_that_hangs_costs_the_spans_that_do_not_fit_and_nothing_waits(since: Callable) -> None:
    collector = Collector()
    collector.hangs = True
    batches = export.Batches(collector, room=10, batch=4, every_s=60.0)
    for _ in range(4):
        batches.on_end(some_span())
    assert collector.asked.acquire(timeout=patient(10))  # the first four hang now
    for _ in range(25):
        batches.on_end(some_span())
    assert since() == {"dropped": 15}
    collector.there.set()
    batches.shutdown()
    assert since() == {"dropped": 15, "delivered": 14}
    assert len(collector.taken) == 14


def test_an_outage_of_the_collector_is_one_line_and_its_end_another(since: Callable) -> None:
    collector = Collector()
    with capture_logs() as lines:
        batches = export.Batches(collector, room=10, batch=1, every_s=60.0)
        for _ in range(3):
            batches.on_end(some_span())
            assert collector.asked.acquire(timeout=patient(10))
        collector.there.set()
        batches.on_end(some_span())
        assert collector.asked.acquire(timeout=patient(10))
        batches.shutdown()
    assert [line["event"] for line in lines] == ["traces_not_delivered", "traces_delivered_again"]
    assert sum(since().values()) == 4
    assert since()["lost"] >= 2


@pytest.fixture
def heard() -> Iterator[tuple[str, list[bytes]]]:
    """A collector over HTTP: (its address, what it was sent)."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_a_collector_by_the_variables_of_the_sdk(
    monkeypatch: pytest.MonkeyPatch, heard: tuple[str, list[bytes]]
) -> None:
    url, bodies = heard
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=here")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    batches = export.otlp()
    monkeypatch.setattr(
        spans, "_tracing", Tracing(batches, service="rollout", name="rollout-1", share=1.0, bus="kafka")
    )
    with spans.span_about("training step", f"{RUN}/0/1"):
        pass
    batches.shutdown()
    (body,) = bodies
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (
        attributes.items()
        >= {
            "service.name": "rollout",
            "service.instance.id": "rollout-1",
            "service.namespace": "etude",
            "deployment.environment.name": "here",
        }.items()
    )
    assert resource.scope_spans[0].spans[0].trace_id.hex() == trace_id(f"{RUN}/0/1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
    ],
)
def test_a_variable_that_cannot_be_followed_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(Told, match=f"{name[:18]}.*{value}"):
        export.otlp()
