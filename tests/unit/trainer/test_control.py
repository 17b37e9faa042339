"""What runs.control makes of a run for the trainer and for a worker. Words that do not fit change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.rollout import runs as rollout
from services.rollout.runs import Runs
from services.trainer.control import RunState
from shared.contracts.messages import RunControl
from shared.objects.directory import DirectoryObjects

WORDS = [
    (["start"], "running", "running"),
    (["start", "pause"], "paused", "held"),
    (["start", "pause:hold"], "held", "held"),
    (["start", "pause:hold", "pause"], "paused", "held"),
    (["start", "pause", "resume"], "running", "running"),
    (["start", "pause", "stop"], "stopping", "held"),
    (["start", "stop", "pause"], "stopping", "held"),
    (["start", "stop", "finished"], "finished", "finished"),
    (["start", "stop", "finished", "pause"], "finished", "finished"),
    (["start", "stop", "finished", "stop"], "finished", "finished"),
    (["start", "stop", "finished", "resume"], "running", "running"),
]


def control(word: str) -> RunControl:
    action, _, hold = word.partition(":")
    named: Any = action
    return RunControl(run="r", action=named, drain=not hold)


@pytest.mark.parametrize(("words", "trainer", "worker"), WORDS)
def test_a_run_follows_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], trainer: str, worker: str
) -> None:
    monkeypatch.setattr(rollout, "SURE_AFTER_S", 0.0)
    state, runs = RunState(), Runs(DirectoryObjects(tmp_path / "objects"), tmp_path / "formats")
    for word in words:
        state.apply(control(word))
        runs.control(control(word))
    assert (state.state, runs.state("r")) == (trainer, worker)


def test_who_has_just_heard_that_a_run_is_over_waits_for_a_later_word(tmp_path: Path) -> None:
    runs = Runs(DirectoryObjects(tmp_path / "objects"), tmp_path / "formats")
    for word in ("start", "stop", "finished", "pause"):
        runs.control(control(word))
    assert runs.state("r") == "held"
    runs.control(control("resume"))
    assert runs.state("r") == "running"
