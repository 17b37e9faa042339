"""A run of the tests says at its end which servers it missed, and the command that brings them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import missing
from tests.patience import patient

ROOT = Path(__file__).resolve().parents[3]
LONELY = """
import pytest
from tests import servers, sglang
from infra import sglang_cpu

@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(servers, "_running", dict)
    monkeypatch.setattr(sglang_cpu, "python", lambda: None)

def test_bus(): servers.need("ETUDE_BUS")
def test_all(): servers.need()
def test_engine(): sglang.interpreter()
def test_chance(): pytest.skip("the candidate happens to pass: not here")
def test_passes(): pass
"""


def test_a_run_without_servers_says_which_and_the_command(tmp_path: Path) -> None:
    """With a worker of its own, as `make test` runs the unit tests: its reports reach the one process that writes."""
    (tmp_path / "test_lonely.py").write_text(LONELY)
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("ETUDE_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n1", "-p", "tests.conftest", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path, env={**unset, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=patient(280),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "Not here: Kafka, MinIO, PostgreSQL, Redis. 2 tests were skipped; `make servers`, then the tests again."
        in done.stdout
    )
    assert "Not here: SGLang (6 GB). 1 test was skipped; `make sglang`, then the tests again." in done.stdout
    assert done.stdout.count("Not here") == 2


def test_nothing_is_said_where_nothing_was_missing() -> None:
    assert missing.summary(["Skipped: the candidate happens to pass", "Skipped: ETUDE_TEST_SERVERS=none"]) == []


def test_commands_stand_in_the_order_of_the_tests_that_want_them() -> None:
    reasons = [missing.reason(["promtool"], "apt-get install prometheus")] + [
        missing.reason(["Kafka"], "make servers")
    ] * 3
    assert [line.partition("`")[2].partition("`")[0] for line in missing.summary(reasons)] == [
        "make servers",
        "apt-get install prometheus",
    ]
