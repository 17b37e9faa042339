"""Who is woken: from a rule that Prometheus finds true to the webhook, with the real programs and the platform's own files."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.servers.ports import free_ports
from tests.patience import patient
from tests.watching import Program, need, running

PROMETHEUS = Path(__file__).resolve().parents[2] / "infra" / "prometheus"
SCRIPT = PROMETHEUS / "alertmanager.sh"


@contextlib.contextmanager
def webhook() -> Iterator[tuple[str, queue.Queue[dict[str, Any]]]]:
    """Its address, and what it is told."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/told?key=a&b=c", told
    finally:
        server.shutdown()
        thread.join()


def as_alertmanager(program: Program, folder: Path) -> dict[str, str]:
    """An environment in which `alertmanager` is that program: Debian calls it otherwise, and a private copy of it looks for its
    templates in the machine's /usr/share."""
    command = f'"{program.path}"'
    share = program.path.parents[1] / "share"
    if not Path("/usr/share/prometheus/alertmanager").exists():
        command = f'bwrap --dev-bind / / --ro-bind "{share}" /usr/share --die-with-parent {command}'
    name = folder / "bin" / "alertmanager"
    name.parent.mkdir()
    name.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    name.chmod(0o755)
    return {**program.environment, "PATH": f"{name.parent}{os.pathsep}{os.environ['PATH']}"}


def test_an_alert_reaches_the_webhook_with_what_to_do(tmp_path: Path) -> None:
    alertmanager = need("prometheus-alertmanager", "prometheus-alertmanager")
    prometheus = need("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    ports = free_ports(3)
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"] = [{"job_name": "trainer", "static_configs": [{"targets": [f"127.0.0.1:{ports[2]}"]}]}]
    (route,) = config["alerting"]["alertmanagers"]
    assert route["static_configs"] == [{"targets": ["alertmanager:9093"]}]  # compose's name and port of it
    route["static_configs"] = [{"targets": [f"127.0.0.1:{ports[0]}"]}]
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule.pop("for", None)
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    with webhook() as (url, told):
        environment = {**as_alertmanager(alertmanager, tmp_path), "ETUDE_ALERT_WEBHOOK": url, "TMPDIR": str(tmp_path)}
        listen, storage = f"--web.listen-address=127.0.0.1:{ports[0]}", f"--storage.path={tmp_path / 'kept'}"
        ask = [
            str(prometheus.path),
            "--config.file=prometheus.yml",
            f"--web.listen-address=127.0.0.1:{ports[1]}",
            "--storage.tsdb.path=data",
        ]
        with (
            running(["sh", str(SCRIPT), listen, storage], tmp_path, environment),
            running(ask, tmp_path, prometheus.environment),
        ):
            while (message := told.get(timeout=patient(60)))["groupLabels"].get("alertname") != "ServiceDown":
                pass
    (alert,) = message["alerts"]
    assert alert["status"] == "firing"
    assert alert["labels"] == {
        "alertname": "ServiceDown",
        "severity": "critical",
        "job": "trainer",
        "instance": f"127.0.0.1:{ports[2]}",
    }
    assert alert["annotations"]["runbook"] == "docs/alerts.md#servicedown"
    assert "docker compose logs trainer" in alert["annotations"]["action"]


@pytest.mark.parametrize("environment", [{}, {"ETUDE_ALERT_WEBHOOK": ""}])
def test_without_an_address_it_says_what_is_missing(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT)], env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "ETUDE_ALERT_WEBHOOK is empty" in done.stderr
