"""Figures of a checkpoint without a run: `etude eval`, and the control that a demo is compared with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from etude.demo.prepare import BASE
from shared.contracts.probe import read as read_probe
from tests.end_to_end.problems import write

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(600)]

FIGURES = {"pass_at_1", "ci95", "first_edit", "best_of_8", "greedy", "tokens_per_solved"}


def _etude(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "etude.cli", *arguments], cwd=cwd, capture_output=True, text=True)


def test_a_checkpoint_is_measured_on_ones_own_problems_with_the_figures_of_a_demo(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl", per_function=2)
    done = _etude(
        "eval", "--checkpoint", str(BASE), "--problems", "mine.jsonl", "--samples", "8", "--json", "found.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    each = found.pop("per_problem")
    assert json.loads(done.stdout) == found
    assert len(each) == found["problems"]
    assert sum(row["solved"] / row["samples"] for row in each.values()) / len(each) == pytest.approx(found["pass_at_1"])
    compared = _etude("compare", "found.json", "found.json", "--json", cwd=tmp_path)
    assert json.loads(compared.stdout)["pass_at_1"]["gain"] == {"mean": 0, "ci95": [0, 0], "problems": len(each)}
    assert found.keys() >= FIGURES
    assert found["problems"] == len((tmp_path / "mine.jsonl").read_text().splitlines())
    assert (found["samples"], found["left_out"], found["infrastructure_errors"]) == (8, 0, 0)
    assert 0 < found["first_edit"] <= found["pass_at_1"] <= found["best_of_8"] <= 1, "the base policy repairs some"
    assert found["ci95"][0] <= found["pass_at_1"] <= found["ci95"][1]


def test_a_probe_of_a_pack_measures_the_problems_that_a_run_practises_on(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl", per_function=2)
    made = _etude("tasks", "import", "mine.jsonl", "--split", "rl", "--out", "pack", cwd=tmp_path)
    assert made.returncode == 0, made.stderr[-3000:]
    done = _etude(
        "tasks", "probe", "pack", "--checkpoint", str(BASE), "--problems", "6", "--samples", "4", "--out", "found.json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "95 % interval" in done.stdout
    found = read_probe((tmp_path / "found.json").read_bytes())
    ids = {json.loads(line)["id"] for line in (tmp_path / "mine.jsonl").read_text().splitlines()}
    assert len(found.problems) == 6
    assert found.problems.keys() <= ids
    assert {one.attempts for one in found.problems.values()} == {4}
    assert 0 < sum(one.solved for one in found.problems.values()) < 24, "the base policy repairs some"


@pytest.mark.nightly
def test_the_control_spends_its_minutes_on_fine_tuning_and_reports_the_same_figures(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl")
    done = _etude(
        "demo", "--control", "sft", "--problems", "mine.jsonl", "--minutes", "0.1", "--groups-per-step", "2",
        "--eval-problems", "2", "--eval-samples", "2", "--report", "control.json", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "control.json").read_text())
    assert (found["control"], found["minutes"], found["before"]["problems"], found["after"]["problems"]) == (
        "sft",
        0.1,
        2,
        2,
    )
    assert found["before"].keys() >= FIGURES
    assert (tmp_path / ".etude" / "control-sft" / "model.safetensors").exists()
