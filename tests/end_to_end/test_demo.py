"""The main job, small: every service as a process, a few steps on problems of our own; one service killed, or all stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.problems import write
from tests.failures import AuditFailed
from tests.patience import patient, until

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(900)]


def _etude(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "etude.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=patient(120)
    )


def _demo(*arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "etude.cli", "demo", "--problems", "problems.jsonl", "--minutes", "60", "--groups-per-step", "2",
        "--group-size", "4", "--eval-samples", "2", "--report", "report.json", *arguments,
    ]  # fmt: skip


def require_sound(report: dict[str, Any]) -> None:
    found = {name: report[name] for name in ("lost", "trained_twice", "staleness_violations")}
    if any(found.values()):
        raise AuditFailed(str(found))


def _steps(state: Path) -> int:
    """Steps that the trainer has logged so far."""
    log = state / "logs" / "trainer.log"
    return log.read_text(errors="replace").count('"event": "step"') if log.exists() else 0


# On real servers at night: the short form of `make chaos` kills every service there, and audits the run in the same way.
@pytest.mark.parametrize(
    "platform_stores", ["embedded", pytest.param("servers", marks=pytest.mark.nightly)], indirect=True
)
@pytest.mark.parametrize("victim", ["trainer"])
@pytest.mark.usefixtures("platform_stores")
def test_a_short_demo_ends_well_and_loses_nothing_when_a_service_is_killed(tmp_path: Path, victim: str) -> None:
    write(tmp_path / "problems.jsonl", per_function=16)
    command = _demo("--steps", "12", "--eval-problems", "6", "--base-port", "0")
    with (tmp_path / "demo.log").open("w") as log:
        demo = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        killed = False
        try:
            until(lambda: demo.poll() is not None or _steps(tmp_path / ".etude") >= 2, "two steps", 400, every=0.2)
            if demo.poll() is None:
                services = json.loads((tmp_path / ".etude" / "supervisor.json").read_text())["services"]
                os.kill(services[victim]["pid"], signal.SIGKILL)
                killed = True
                verified = _etude("weights", "verify", cwd=tmp_path)
                demo.wait(patient(400))
        finally:
            demo.terminate()  # nothing where it has ended
    text = (tmp_path / "demo.log").read_text()
    assert demo.returncode == 0, text[-3000:]
    assert killed, text[-3000:]
    compared = {line["what"]: line["equal"] for line in map(json.loads, verified.stdout.splitlines())}
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert compared["engine"] is compared["chain"] is True
    report = json.loads((tmp_path / "report.json").read_text())
    require_sound(report)
    assert report["steps"] >= 12
    assert report["counts"]["bus"] == report["counts"]["ledger"]
    assert report["before"]["problems"] == report["after"]["problems"] == 6
    audit = _etude("ledger", "audit", report["run"], cwd=tmp_path)
    if audit.returncode != 0:
        raise AuditFailed(audit.stdout + audit.stderr)


def test_a_demo_that_is_stopped_by_ctrl_c_goes_on_and_ends_well(tmp_path: Path) -> None:
    write(tmp_path / "problems.jsonl", per_function=8)
    with (tmp_path / "demo.log").open("w") as log:
        first = subprocess.Popen(
            _demo("--steps", "5", "--eval-problems", "3", "--base-port", "0"),
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        until(lambda: first.poll() is not None or _steps(tmp_path / ".etude") >= 2, "two steps", 400, every=0.2)
        os.killpg(first.pid, signal.SIGINT)  # as a terminal does
        code = first.wait(patient(120))
    text = (tmp_path / "demo.log").read_text()
    assert code == 130, text[-3000:]
    assert "Stopped. `etude demo --resume` goes on from here." in text
    assert "Traceback" not in text
    for log in (tmp_path / ".etude" / "logs").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.name
    assert not (tmp_path / "report.json").exists()
    memory = json.loads((tmp_path / ".etude" / "demo.json").read_text())
    assert memory["phase"] == "practice"
    second = subprocess.run(
        [sys.executable, "-m", "etude.cli", "demo", "--resume", "--base-port", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["run"] == memory["run"]
    require_sound(report)
    assert report["steps"] >= 5
    assert report["before"]["problems"] == report["after"]["problems"] == 3
