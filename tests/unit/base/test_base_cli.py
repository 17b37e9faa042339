"""`etude base`: what a person can mend is told in a line, before anything is made."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.trainer.base.cli import app


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("probe --pack nowhere", "no nowhere/dev.hidden.jsonl.zst"),
        ("probe nowhere", "nowhere: no config.json"),
        ("probe --split held_out", "split: found 'held_out'; development figures come from dev"),
        ("sft --from nowhere --out made", "nowhere: found no etude.json there"),
        ("surprise --pack nowhere --out made", "no nowhere/rl.hidden.jsonl.zst"),
        ("make --pack nowhere --out made", "no nowhere/train.hidden.jsonl.zst"),
        ("leaks --pack nowhere", "no nowhere/rl.hidden.jsonl.zst"),
    ],
)
def test_what_is_not_there_is_told_in_a_line_and_nothing_is_made(
    command: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(f"base: {says}")
    assert not Path("made").exists()
