"""`etude weights`: what cannot be done is said, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from services.trainer import cli


def test_without_a_run_there_is_nothing_to_verify(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["verify", "--state", str(tmp_path)])
    assert result.exit_code == 2
    assert "no run in the object store" in result.output


def test_a_setting_that_is_wrong_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["verify", "--state", str(tmp_path)], env={"ETUDE_PORT": "x"})
    assert result.exit_code == 2
    assert "ETUDE_PORT" in result.output
