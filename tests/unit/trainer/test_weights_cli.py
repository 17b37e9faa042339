"""`etude weights`: what cannot be done is said, and nothing is left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.inference import cli as inference
from services.trainer import cli


class Engine(BaseHTTPRequestHandler):
    """What an engine that serves a checkpoint answers to /weights_checker."""

    def do_POST(self) -> None:
        body = json.dumps({"run": "", "serial": 1, "checksum": "0" * 32}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_without_a_run_there_is_nothing_to_verify(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["verify", "--state", str(tmp_path)])
    assert result.exit_code == 2
    assert "no run in the object store" in result.output


def test_a_setting_that_is_wrong_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["verify", "--state", str(tmp_path)], env={"ETUDE_PORT": "x"})
    assert result.exit_code == 2
    assert "ETUDE_PORT" in result.output


def test_an_engine_that_serves_a_checkpoint_is_compared_with_no_run(tmp_path: Path, engine: str) -> None:
    verified = CliRunner().invoke(cli.app, ["verify", "--state", str(tmp_path), "--run", "r", "--engine", engine])
    assert verified.exit_code == 2
    line = json.loads(verified.stdout.splitlines()[0])
    assert (line["equal"], line["answers"]) == (None, True)
    looked_at = CliRunner().invoke(inference.app, ["checksum", engine], env={"ETUDE_STATE": str(tmp_path)})
    assert looked_at.exit_code == 1
    report = json.loads(looked_at.stdout)
    assert (report["equal"], report["manifest"]) == (False, None)
    assert line["reason"].startswith("it serves a checkpoint (ETUDE_CHECKPOINT)")
    assert report["reason"].startswith("it serves a checkpoint (ETUDE_CHECKPOINT)")
