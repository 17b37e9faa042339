"""The health check of the containers: what a service says decides, and what it has said before."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROBE = Path(__file__).resolve().parents[3] / "infra" / "docker" / "probe.py"
_specification = importlib.util.spec_from_file_location("probe", PROBE)
assert _specification
assert _specification.loader
probe = importlib.util.module_from_spec(_specification)
_specification.loader.exec_module(probe)


class Service:
    """Answers as told: path -> status."""

    def __init__(self) -> None:
        self.says = {"/healthz": 200, "/readyz": 503}
        says = self.says

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(says[self.path])
                self.end_headers()
                self.wfile.write(b'{"waits_on": "a bus"}')

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.server.shutdown()
    running.server.server_close()


def test_alive_asks_only_whether_it_answers(service, tmp_path):
    assert probe.main("alive", service.port, tmp_path / "mark") == 0
    service.says["/healthz"] = 500
    assert probe.main("alive", service.port, tmp_path / "mark") == 1


def test_ready_once_is_enough_until_it_stops_answering(service, tmp_path, capsys):
    mark = tmp_path / "mark"
    assert probe.main("once-ready", service.port, mark) == 1
    assert "a bus" in capsys.readouterr().out, "the reason is in `docker inspect`"
    service.says["/readyz"] = 200
    assert probe.main("once-ready", service.port, mark) == 0
    service.says["/readyz"] = 503
    assert probe.main("once-ready", service.port, mark) == 0
    service.says["/healthz"] = 500
    assert probe.main("once-ready", service.port, mark) == 1


def test_nobody_who_listens_is_not_alive(tmp_path):
    assert probe.main("alive", 9, tmp_path / "mark") == 1


def test_an_unknown_mode_is_named_with_what_is_allowed():
    done = subprocess.run([sys.executable, PROBE, "well"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "well" in done.stderr
    assert "alive or once-ready" in done.stderr
