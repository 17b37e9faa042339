"""Whether a worker takes attempts of a run, by how the run stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.rollout import runs as rollout
from services.rollout.runs import Runs
from shared.objects.directory import DirectoryObjects
from tests.ruling import status

STATES = {"running": "running", "paused": "held", "stopping": "held", "finished": "finished"}


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(DirectoryObjects(tmp_path / "objects"), tmp_path / "formats")


def test_a_run_follows_its_newest_status(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "SURE_AFTER_S", 0.0)
    assert runs.state("r") == "running"  # somebody asks for attempts of it
    for state, expected in STATES.items():
        runs.hear(status("r", state))
        assert runs.state("r") == expected
    runs.hear(status("r", "running"))
    runs.hear(status("r", "finished", number=1))  # an old one
    assert runs.state("r") == "running"


def test_who_has_just_heard_that_a_run_is_over_waits_for_a_later_status(runs: Runs) -> None:
    runs.hear(status("r", "finished"))
    assert runs.state("r") == "held"
    runs.hear(status("r", "running"))
    assert runs.state("r") == "running"
