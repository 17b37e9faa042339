"""Addresses of outside systems are checked before anything starts, and a service that keeps dying is heard in `etude status`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from etude import doctor, service_logs
from etude import supervisor as s
from etude.status import collect, show
from services.__main__ import wrong
from shared.settings import ADDRESSES, BadSettings, ServiceSettings, read
from tests.patience import until

WRONG = [
    ("bus", "kafak://x:1", "did you mean kafka://"),
    ("bus", "Kafka://x:1", "did you mean kafka://"),
    ("bus", "kafka:x:1", "did you mean kafka://"),
    ("bus", "bus.db", "allowed: sqlite:PATH, kafka://"),
    ("bus", "sqlite:", "did you mean sqlite:PATH?"),
    (
        "ledger",
        "postgres://u:hush@h/db",
        "found 'postgres://…@h/db': did you mean postgresql://USER:PASSWORD@HOST/NAME?",
    ),
    ("ledger", "sqlite:ledger.db", "did you mean sqlite:///PATH?"),
    ("ledger", "mysql://u:hush@h/db", "allowed: sqlite:///PATH, postgresql://"),
    ("objects", "s3a://b@h:1", "did you mean s3://BUCKET@HOST:PORT?"),
    ("objects", "s4://b@h:1", "did you mean s3://BUCKET@HOST:PORT?"),
    ("objects", "/data/objects", "allowed: file:PATH, s3://"),
    ("jobs", "foo", "allowed: sqla+sqlite:///PATH, redis://"),
    ("jobs", "rediis://:hush@h:6379/0", "did you mean redis://"),
    ("jobs", "sqlite:///jobs.db", "did you mean sqla+sqlite:///PATH?"),
]


@pytest.mark.parametrize(("setting", "url", "said"), WRONG, ids=[f"{name}={url}" for name, url, _ in WRONG])
def test_an_address_that_no_adapter_takes_is_refused_with_the_nearest_form(
    setting: str, url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"ETUDE_{setting.upper()}", url)
    (line,) = wrong()  # `python -m services --check`, `etude doctor`, `up`, `demo`
    assert line.startswith(f"setting ETUDE_{setting.upper()}: found '")
    assert said in line
    assert "hush" not in line
    with pytest.raises(BadSettings):
        read(ServiceSettings)


RIGHT = {
    "bus": ["sqlite:bus.db", "sqlite:/a/b.db?synchronous=full", "kafka://a:1", "kafka://u:p@a:1,b:2/t?tls=1"],
    "ledger": [
        "sqlite:///l.db",
        "sqlite:////a/l.db",
        "postgresql://u:p@h/n",
        "postgresql+psycopg://u:p@h/n?sslmode=require",
    ],
    "objects": ["file:o", "file:/a/o?fsync=1", "s3://b@h:1", "s3://b@h:1?secure=1"],
    "jobs": ["sqla+sqlite:////a/j.db", "redis://h:1/0", "redis://:p@h:1/0", "rediss://h:1/0", "amqp://u:p@h:1//"],
}


def test_what_the_documents_name_and_the_defaults_are_taken() -> None:
    assert RIGHT.keys() == ADDRESSES.keys()
    for setting, urls in RIGHT.items():
        for url in ("", *urls):
            assert getattr(ServiceSettings.model_validate({setting: url}), setting) == url
    default = ServiceSettings()
    for setting in ADDRESSES:
        url = getattr(default, f"{setting}_url")
        assert getattr(ServiceSettings.model_validate({setting: url}), setting) == url


@pytest.mark.parametrize("command", ["up --detach --base-port 0", "demo", "runs"])
def test_nothing_starts_under_a_wrong_address(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli", *command.split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "ETUDE_BUS": "kafak://x:1"},
    )
    assert (done.returncode, "did you mean kafka://" in done.stderr) == (1, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_misses_what_traces_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETUDE_TRACES", "0.5")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for module in ("telemetry_otel", "telemetry_export"):
        monkeypatch.delitem(sys.modules, f"shared.{module}", raising=False)
    (line,) = wrong()
    assert line.startswith("traces (ETUDE_TRACES): found 0.5, and the OpenTelemetry SDK is missing")
    monkeypatch.undo()
    monkeypatch.setenv("ETUDE_LEDGER", "postgres://u:hush@h/db")
    finding = doctor.settings()
    assert (finding.ok, "did you mean postgresql://" in finding.found) == (False, True)


def test_status_says_what_a_service_that_keeps_dying_said_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "dies.py").write_text("print('begins')\nraise ValueError('Invalid learning rate: -1.0')\n")
    told: list[str] = []
    with s.Supervisor(tmp_path, say=told.append) as supervisor:
        supervisor.start([s.ServiceSpec("dies", "dies", {"PYTHONPATH": str(tmp_path)})])
        until(lambda: supervisor.restarts()["dies"] >= 2, "the second start", 60)
        (row,) = until(
            lambda: [row for row in collect(tmp_path) if row.get("ended")], "the end that the supervisor wrote"
        )
        show(tmp_path, as_json=False)
    last = "exit code 1: ValueError: Invalid learning rate: -1.0"
    assert (row["state"] in ("down", "starting"), row["ended"]) == (True, last)
    assert f"ended with {last}" in capsys.readouterr().out
    assert "It said last: ValueError: Invalid learning rate: -1.0" in told[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("a\n\n", "a"),
        ('{"reason": "no room", "event": "cannot_go_on"}\n', "no room"),
        ('{"event": "stopped"}\n', "stopped"),
        ("x" * 9000, "x" * 500),
        ("[1]\n", "[1]"),
    ],
)
def test_the_last_words_of_a_log(tmp_path: Path, text: str, words: str) -> None:
    log = tmp_path / "a.log"
    assert service_logs.last_words(log) == ""
    log.write_text(text)
    assert service_logs.last_words(log) == words
