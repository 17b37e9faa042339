"""`etude train`: what its commands say."""

from __future__ import annotations

import json
from pathlib import Path

import phase_data
import pytest
from typer.testing import CliRunner

from services.trainer.train_cli import app


def called(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return done.exit_code, done.output


def test_rl_says_how_to_start_the_run_and_names_a_wrong_field(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[train]\nlearning_rate = 1e-5\n[schedule]\nmax_steps = 3\n")
    code, said = called("rl", config)
    assert code == 0
    assert "etude start --base NAME --config" in said
    assert json.loads((tmp_path / "run.json").read_text()) == {
        "train": {"learning_rate": 1e-5},
        "schedule": {"max_steps": 3},
    }
    config.write_text("[train]\nlearning_rate = 2.0\n[data]\n")
    (tmp_path / "run.json").unlink()
    code, said = called("rl", config)
    assert code == 2
    assert "train.learning_rate: found 2.0; allowed: 0 to 1" in said
    assert "found 'data'; allowed: sampling, reward, schedule, train" in said
    assert not (tmp_path / "run.json").exists()


def test_a_report_joins_runs_and_fits_loss_against_log_compute(tmp_path: Path) -> None:
    for k in (10, 11, 12):
        (tmp_path / f"run-{k}").mkdir()
        held_out = {"code": {"nats_per_token": 5 - 0.25 * k}}
        line = {"phase": "cpt", "step": k, "tokens": k, "flops": 10.0**k, "held_out": held_out}
        (tmp_path / f"run-{k}" / "losses.jsonl").write_text(json.dumps(line) + "\n")
    code, said = called("report", *sorted(tmp_path.iterdir()))
    assert code == 0
    assert "code: loss = 5.000 - 0.2500 · log10(FLOP), R² 1.000 over 3 measurements" in said
    assert called("report", tmp_path / "nowhere")[0] == 2


def test_the_loss_of_a_checkpoint_is_measured_by_a_rolling_window(tmp_path: Path) -> None:
    phase_data.pretraining(tmp_path)
    out = tmp_path / "figures.json"
    data = ("--data", tmp_path / "other", "--window", 48, "--stride", 24, "--json", out)
    assert called("evaluate-loss", tmp_path / "start", *data)[0] == 0
    (figures,) = json.loads(out.read_text()).values()
    tokens = json.loads((tmp_path / "other" / "manifest.json").read_text())["tokens"]
    assert figures["tokens"] == tokens - 1
    assert figures["nats_per_token"] == pytest.approx(figures["bits_per_byte"] * 0.6931, rel=0.1)
    out.unlink()
    code, said = called("evaluate-loss", tmp_path / "start", *data, "--check")
    assert (code, out.exists(), f"{tmp_path}/other: {tokens:,} tokens" in said) == (0, False, True)
    for check in ([], ["--check"]):
        code, said = called("evaluate-loss", tmp_path / "start", "--data", tmp_path / "other", "--window", 999, *check)
        assert code == 2
        assert "measure.window: found 999; allowed: 2 to 256" in said
