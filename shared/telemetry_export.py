"""Spans on their way out, by OTLP over HTTP: a bounded queue and a thread of its own.

Not the SDK's own batches: those keep a process that ends for half a minute while the collector is away, log a line for every
span that does not fit, and start a thread in every fork. Here nothing that a service does waits for the collector, what does not
fit is counted, and what was the matter stands in one line until it is over. The variables are the SDK's (`OTEL_BSP_…`).
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import Counter

from shared.settings import Told, masked

ROOM, BATCH, EVERY_MS = 2048, 512, 5000  # the SDK's defaults; a span takes about 4 kB
LEAVE_S = 2.0  # for what still waits when the process ends
SPANS = Counter(
    "etude_traces_spans_total",
    "Spans that ended here: delivered; lost: the collector did not take them; dropped: too many waited for it.",
    ["outcome"],
)
DELIVERED, LOST, DROPPED = (SPANS.labels(outcome) for outcome in ("delivered", "lost", "dropped"))

log = structlog.get_logger()


class Batches(SpanProcessor):
    """At most `room` spans wait, the newest are dropped. `every_s`: the longest that one waits while the collector takes them."""

    def __init__(self, exporter: SpanExporter, *, room: int = ROOM, batch: int = BATCH, every_s: float = 5.0) -> None:
        self._exporter, self._room, self._batch, self._every_s = exporter, room, min(batch, room), every_s
        self._waiting: deque[ReadableSpan] = deque()
        self._changed = threading.Condition()
        self._closing = self._failing = False
        self._reasons = _Reasons()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        with self._changed:
            fits = len(self._waiting) < self._room and not self._closing
            if fits:
                self._waiting.append(span)
                if len(self._waiting) == self._batch:
                    self._changed.notify()
        if not fits:
            DROPPED.inc()

    def shutdown(self) -> None:
        """What waits goes out if the collector takes it within `LEAVE_S`."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._thread.join(LEAVE_S)
        self._exporter.shutdown()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or len(self._waiting) >= self._batch, self._every_s)
                batch = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
                closing = self._closing
            if batch:
                self._deliver(batch)
            elif closing:
                return

    def _deliver(self, batch: list[ReadableSpan]) -> None:
        began = time.monotonic()
        try:
            delivered = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # whatever it is: a thread that ends would let the queue fill for ever
            delivered, self._reasons.last = False, f"{type(error).__name__}: {error}"
        (DELIVERED if delivered else LOST).inc(len(batch))
        if not delivered and not self._failing:
            tried = round(time.monotonic() - began, 1)
            log.warning("traces_not_delivered", reason=self._reasons.last, spans=len(batch), tried_s=tried)
        elif delivered and self._failing:
            log.info("traces_delivered_again")
        self._failing = not delivered


class _Reasons(logging.Handler):
    """The exporter says why it failed in its log alone, several times for every batch: kept instead of shown."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "the collector did not take them"
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.handlers, exporters.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()[:500]


def otlp() -> Batches:
    """To where the SDK's variables say. Raises Told for one that cannot be followed."""
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    for name in protocols:
        if (found := os.environ.get(name, "http/protobuf")) != "http/protobuf":
            raise Told(f"traces: {name}: found {found!r}; allowed: http/protobuf (a collector takes it at port 4318)")
    batches = Batches(
        OTLPSpanExporter(),
        room=_number("OTEL_BSP_MAX_QUEUE_SIZE", ROOM),
        batch=_number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH),
        every_s=_number("OTEL_BSP_SCHEDULE_DELAY", EVERY_MS) / 1000,
    )
    atexit.register(batches.shutdown)
    base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    log.info("traces_on", to=masked(os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or base))
    return batches


def _number(name: str, default: int) -> int:
    found = os.environ.get(name) or str(default)
    if not found.isdecimal() or int(found) < 1:
        raise Told(f"traces: {name}: found {found!r}; allowed: a whole number above 0")
    return int(found)
