"""What asks our own services uses no proxy, whatever the environment names."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.status import _get
from services.inference.cli import _post
from services.trainer.cli import _verify_engine
from shared import direct
from shared.objects.directory import DirectoryObjects

ROOT = Path(__file__).parents[3]
# urllib asks the environment's proxy, as requests and httpx do; aiohttp only if it is told to.
PROXIED = re.compile(
    r"\burlopen\(|\burlretrieve\(|\btrust_env\s*=\s*True|^\s*(import|from) (requests|httpx)\b|build_opener\(", re.M
)
MAKERS = {"shared/direct.py", "infra/docker/probe.py"}  # the second is alone in its image, with the standard library

FOREIGN = {"shared/sandbox/containers/engine.py"}  # asks the container engine, which is not ours


class _Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"name": "here", "run": "", "serial": 0}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A service of ours, in an environment whose proxy does not answer."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_commands_reach_a_service_past_a_proxy(port: int, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{port}"
    assert (_get(f"{url}/healthz") or {})["name"] == "here"
    assert _post(url, {})["name"] == "here"
    assert _verify_engine(DirectoryObjects(tmp_path), url)["answers"]
    with direct.ask(url, 5.0) as answer:
        assert answer.status == 200


def test_the_probe_of_a_container_passes_by_a_proxy(port: int) -> None:
    environment = {**os.environ, "ETUDE_PORT": str(port)}
    probe = [sys.executable, str(ROOT / "infra/docker/probe.py"), "alive"]
    assert subprocess.run(probe, env=environment, check=False).returncode == 0


def test_nothing_else_makes_a_client_that_asks_a_proxy() -> None:
    folders = ("services", "shared", "etude", "infra", "benchmarks")
    files = {str(file.relative_to(ROOT)): file for folder in folders for file in (ROOT / folder).rglob("*.py")}
    found = {name for name, file in files.items() if PROXIED.search(file.read_text())}
    assert found == MAKERS | FOREIGN
