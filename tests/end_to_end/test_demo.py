"""The main job, small: every service as a process, a few steps on problems of our own, one service killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.problems import write

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _etude(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "etude.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def _steps(state: Path) -> int:
    """Steps that the trainer has logged so far."""
    log = state / "logs" / "trainer.log"
    return log.read_text(errors="replace").count('"event": "step"') if log.exists() else 0


@pytest.mark.usefixtures("platform_stores")
@pytest.mark.parametrize("victim", ["trainer"])
def test_a_short_demo_ends_well_and_loses_nothing_when_a_service_is_killed(tmp_path: Path, victim: str) -> None:
    write(tmp_path / "problems.jsonl", per_function=16)
    command = [
        sys.executable, "-m", "etude.cli", "demo", "--problems", "problems.jsonl", "--steps", "12", "--minutes", "6",
        "--groups-per-step", "2", "--group-size", "4", "--eval-problems", "6", "--eval-samples", "2",
        "--report", "report.json",
    ]  # fmt: skip
    with (tmp_path / "demo.log").open("w") as log:
        demo = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        killed = False
        while demo.poll() is None:
            time.sleep(0.2)
            if not killed and _steps(tmp_path / ".etude") >= 2:
                services = json.loads((tmp_path / ".etude" / "supervisor.json").read_text())["services"]
                os.kill(services[victim]["pid"], signal.SIGKILL)
                killed = True
    text = (tmp_path / "demo.log").read_text()
    assert demo.returncode == 0, text[-3000:]
    assert killed, text[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert [report[k] for k in ("lost", "trained_twice", "staleness_violations")] == [0, 0, 0]
    assert report["steps"] >= 12
    assert report["counts"]["bus"] == report["counts"]["ledger"]
    assert report["before"]["problems"] == report["after"]["problems"] == 6
    audit = _etude("ledger", "audit", report["run"], cwd=tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr
