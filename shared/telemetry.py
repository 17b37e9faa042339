"""Logs, metrics and health, alike for every service; spans where they are wanted (shared.telemetry_spans).

`configure_logs` once per process; `Health` serves `/healthz` (alive), `/readyz` (ready, or waiting on what since when)
and `/metrics` (Prometheus; names `etude_<service>_<what>_<unit>`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any

import structlog
from aiohttp import web
from prometheus_client import REGISTRY, Gauge, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from shared import telemetry_spans
from shared.contracts.tracing import trace_id
from shared.settings import ServiceSettings, Told, in_url


def configure_logs(service: str, settings: ServiceSettings) -> None:
    """One event a line; JSON unless on a terminal. Facts as fields: run, group, attempt, version are bound by the caller.

    Traces begin here too, where they are on: the rest of a process is then the same with and without them. Raises Told where
    they cannot be had."""
    as_text = settings.logs == "text" or (settings.logs == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if as_text else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _add_trace,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(settings.log_level)),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    sys.excepthook = _say_last_words
    if settings.traces > 0:
        bus = settings.bus_url.partition(":")[0]
        telemetry_spans.start(service, replica_name(service, settings), settings.traces, bus)


def _add_trace(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A line about an attempt, a group or a run carries the id that its messages carry."""
    about = event.get("attempt") or event.get("group") or event.get("run")
    if isinstance(about, str) and "trace" not in event:
        event["trace"] = trace_id(about)
    return event


def _say_last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if isinstance(error, Told):
        structlog.get_logger().error("cannot_go_on", reason=str(error))
    else:
        sys.__excepthook__(kind, error, trace)


def replica_name(service: str, settings: ServiceSettings) -> str:
    return settings.name or f"{service}-{socket.gethostname()}-{os.getpid()}"


disable_created_metrics()  # when each counter began: as many series again, and nobody asks
WAITS = Gauge(
    "etude_health_waiting_since_seconds",
    "Unix time since when the service waits, by what it waits on; no series: it waits on nothing.",
    ["on"],
)
READY = Gauge("etude_health_ready", "1 while the service waits on nothing.")
_LABEL_CHARS = 80  # what is waited on may carry an error's text; a label is no log


class Health:
    """What the service waits on, and since when. Empty: ready. Wall-clock seconds, for people.

    `async with Health(...)` serves the endpoints on settings.host:settings.port and writes `<state>/run/<name>.json`
    (pid, port) so that `etude status` finds it.
    """

    def __init__(self, service: str, settings: ServiceSettings, app: web.Application | None = None) -> None:
        self.service = service
        self.settings = settings
        self.name = replica_name(service, settings)
        self.url = ""
        self._waits: dict[str, float] = {}
        self._tells: dict[str, str] = {}
        self._app = app or web.Application()
        self._runner: web.AppRunner | None = None
        self._file: Path | None = None
        READY.set(1)
        self._app.add_routes(
            [web.get("/healthz", self._healthz), web.get("/readyz", self._readyz), web.get("/metrics", self._metrics)]
        )

    def wait_on(self, what: str) -> bool:
        """The service cannot work before `what` is there. Repeating it keeps the first time. Whether it is new: who waits
        with a hundred others need not say it again."""
        new = what not in self._waits
        since = self._waits.setdefault(what, time.time())
        WAITS.labels(what[:_LABEL_CHARS]).set(since)
        READY.set(0)
        return new

    def clear(self, what: str) -> None:
        if self._waits.pop(what, None) is not None:
            with contextlib.suppress(KeyError):  # two texts may share their beginning
                WAITS.remove(what[:_LABEL_CHARS])
        READY.set(self.ready)

    def tell(self, about: str, what: str | None) -> None:
        """Show what the service reckons with about a run, say, at `/readyz` and in `etude status`. None: nothing any more."""
        if what is None:
            self._tells.pop(about, None)
        else:
            self._tells[about] = what

    @property
    def ready(self) -> bool:
        return not self._waits

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.json_response({"service": self.service, "name": self.name, "pid": os.getpid()})

    async def _readyz(self, _: web.Request) -> web.Response:
        now = time.time()
        waits = [
            {"waits_on": what, "since": since, "seconds": round(now - since, 1)} for what, since in self._waits.items()
        ]
        answer = {"ready": self.ready, "waits": waits, "tells": self._tells}
        return web.json_response(answer, status=200 if self.ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        """As OpenMetrics for whoever asks for that, as Prometheus does: it alone has exemplars."""
        if "application/openmetrics-text" in request.headers.get("Accept", ""):
            # Names go as they are. The client's own choice would write SGLang's colons as underscores.
            body = openmetrics.generate_latest(REGISTRY, escaping=openmetrics.ALLOWUTF8)
            return web.Response(body=body, headers={"Content-Type": openmetrics.CONTENT_TYPE_LATEST})
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def __aenter__(self) -> Health:
        self._runner = web.AppRunner(self._app, access_log=None)
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self.settings.host, self.settings.port)
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise SystemExit(
                f"{self.service}: cannot listen on {self.settings.host}:{self.settings.port} ({error.strerror}); "
                "set ETUDE_PORT to a free port or end what uses it"
            ) from None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://{in_url(self.settings.reachable)}:{port}"
        self._file = self.settings.state / "run" / f"{self.name}.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        written = self._file.with_suffix(".tmp")  # whole or not at all: `etude status` and others read it at any time
        written.write_text(
            json.dumps({"service": self.service, "name": self.name, "pid": os.getpid(), "url": self.url})
        )
        written.replace(self._file)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._runner:
            await self._runner.cleanup()
        if self._file:
            self._file.unlink(missing_ok=True)


class Wait:
    """One thing that a service waits on, in words that change."""

    def __init__(self, health: Health) -> None:
        self._health, self._what = health, ""

    def on(self, what: str) -> None:
        """Wait on this instead of what was said before. Empty: wait no longer."""
        if what != self._what:
            self._health.clear(self._what)
        if what:
            self._health.wait_on(what)
        self._what = what


@contextlib.asynccontextmanager
async def draining() -> AsyncIterator[asyncio.Event]:
    """The event is set by the first SIGTERM or SIGINT (stop taking work, finish or checkpoint what is in hand, leave);
    the second one ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
