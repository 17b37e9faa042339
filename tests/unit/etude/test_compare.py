"""`etude compare`: the paired interval of two measurements, and a clear refusal of files that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from etude.cli import app
from etude.commands import register
from etude.compare import PER_PROBLEM, rows
from shared.output import with_rows
from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.statistics import paired_difference

register(app)
FIGURES = {"pass_at_1": 0.5, "ci95": None, "problems": 40, "left_out": 0}


def pair(name: str, expected: str = "1") -> tuple[FunctionProblem, FunctionHidden]:
    problem = FunctionProblem(id=name, files={"f.py": "def f(): ..."}, entry="f", visible=[])
    return problem, FunctionHidden(id=name, cases=[Case(args="[]", expected=expected)])


def measured(path: Path, solved: dict[str, int], expected: str = "1", **changed: Any) -> Path:
    """Figures as `etude eval --json` writes them, of 4 attempts a problem."""
    row = {"samples": 4, "first_edit": 0, "tokens": 40, "greedy": True, "errors": 0, "attempts": [{}], **changed}
    report = {"problems": {name: {**row, "solved": count} for name, count in solved.items()}}
    path.write_text(with_rows(FIGURES, PER_PROBLEM, rows(report, [pair(name, expected) for name in solved])))
    return path


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_file_keeps_the_figures_and_each_problem(tmp_path: Path) -> None:
    found = json.loads(measured(tmp_path / "a.json", {"p": 3, 'q"': 0}).read_text())
    each = found.pop("per_problem")
    assert found == FIGURES
    assert each["p"].pop("problem") != each['q"'].pop("problem")
    assert each["p"] == {"samples": 4, "solved": 3, "first_edit": 0, "tokens": 40, "greedy": True, "errors": 0}


def test_the_difference_is_paired_over_the_problems(tmp_path: Path) -> None:
    before = {f"p{i}": i % 5 for i in range(40)}
    after = {f"p{i}": min(4, i % 5 + i % 2) for i in range(40)}
    a, b = measured(tmp_path / "a.json", before), measured(tmp_path / "b.json", after, greedy=False)
    found = json.loads(compare(a, b, "--json").stdout)
    mean, low, high = paired_difference(*(np.array([s[k] / 4 for k in sorted(before)]) for s in (before, after)))
    assert found["pass_at_1"]["gain"] == {"mean": mean, "ci95": [low, high], "problems": 40}
    assert 0 < low < mean < high
    assert found["greedy"]["gain"]["mean"] == -1
    text = compare(a, b).stdout
    assert f"{100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]" in text
    assert "40 problems in both" in text


def test_problems_that_one_file_lacks_or_lost_count_for_nothing_and_are_said(tmp_path: Path) -> None:
    a = measured(tmp_path / "a.json", {"p": 4, "q": 0, "r": 4})
    b = measured(tmp_path / "b.json", {"p": 4, "q": 4})
    said = compare(a, b)
    assert (said.exit_code, "2 problems in both" in said.stdout) == (0, True)
    assert "a.json alone has 1 more problems" in said.stdout
    found = json.loads(compare(a, b, "--json").stdout)
    assert (found["pass_at_1"]["before"], found["pass_at_1"]["after"], found["only_before"]) == (0.5, 1.0, 1)
    lost = measured(tmp_path / "c.json", {"p": 0}, samples=0, greedy=None)
    assert "no problem has results in both files" in compare(a, lost).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory; allowed: a file that `etude eval --json FILE` wrote"),
        ("", "found no figures"),
        ("[]", "found no figures: Expected `object`, got `array`"),
        ("\ud800", "found no figures"),
        (json.dumps(FIGURES), "has no field 'per_problem', as figures of a demo and of older versions; allowed: "),
        ('{"per_problem": {"p": {"samples": 1}}}', "found no figures: Object missing required field"),
        ('{"per_problem": {}}', "no problem has results in both files: found 1 and 0 problems"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(tmp_path: Path, text: str | None, said: str) -> None:
    a, bad = measured(tmp_path / "a.json", {"p": 1}), tmp_path / "bad.json"
    if text is not None:
        bad.write_bytes(text.encode("utf-8", "surrogatepass"))
    result = compare(a, bad)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_other_problems_are_refused_by_id_and_by_content(tmp_path: Path) -> None:
    a = measured(tmp_path / "a.json", {"p": 1})
    other = compare(a, measured(tmp_path / "b.json", {"q": 1}))
    assert (other.exit_code, "no problem has results in both files: found 1 and 1" in other.stderr) == (2, True)
    same_name = compare(a, measured(tmp_path / "c.json", {"p": 1}, expected="2"))
    assert same_name.exit_code == 2
    assert "1 of 1 ids that both files have, such as 'p', name different problems" in same_name.stderr
    too_many = compare(a, measured(tmp_path / "d.json", {"p": 5}))
    assert "problem 'p': more attempts were right than were made" in too_many.stderr
