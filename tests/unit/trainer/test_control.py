"""What runs.control makes of a run for the trainer and for a worker. Words that do not fit change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.rollout.runs import Runs
from services.trainer.service import RunState
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
def test_a_run_follows_its_words(tmp_path: Path, words: list[str], trainer: str, worker: str) -> None:
    state, runs = RunState(), Runs(DirectoryObjects(tmp_path / "objects"), tmp_path / "formats")
    for word in words:
        state.apply(control(word))
        runs.control(control(word))
    assert (state.state, runs.state("r")) == (trainer, worker)
