"""The names in report.json: each says what it holds."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from etude.canary import Trial, verdict
from etude.demo.report import figures_of, in_points, paired, require_place, table
from shared.output import NotWritable

EVALUATED = {"pass_at_1": 0.3, "pass_at_1_low": 0.2, "pass_at_1_high": 0.4, "first_edit": 0.1, "best_of_k": 0.625}


def evaluation(samples: int, **more: float) -> dict[str, Any]:
    """As services/evaluator/figures.py gives them: k is 8, or the samples there are."""
    counts = {"samples": float(samples), "k": float(min(8, samples)), "problems": 4.0, "infrastructure_errors": 0.0}
    return {"figures": {**EVALUATED, **counts, **more}, "problems": {}}


@pytest.mark.parametrize("samples", [8, 16])
def test_best_of_8_is_there_where_it_is_of_8(samples: int) -> None:
    figures = figures_of(evaluation(samples, tokens_per_solved=90.0))
    assert figures["best_of_8"] == 0.625
    assert "best_of_k" not in figures


@pytest.mark.parametrize("name", ["report.md", "report.png"])
def test_a_report_that_its_plot_or_text_would_overwrite_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(NotWritable, match=r"plot and text go beside it, as \.png and \.md"):
        require_place(tmp_path / name)
    require_place(tmp_path / "report.json")


def test_best_of_fewer_is_not_called_best_of_8() -> None:
    figures = figures_of(evaluation(3, tokens_per_solved=90.0))
    assert (figures["best_of_k"], figures["k"]) == (0.625, 3)
    assert figures["best_of_8"] is None


@pytest.mark.parametrize(("samples", "label"), [(3, "best of 3"), (8, "best of 8"), (16, "best of 8")])
def test_the_table_says_of_how_many_the_best_is_and_has_a_dash_where_nothing_was_solved(
    samples: int, label: str
) -> None:
    figures = figures_of(evaluation(samples))
    out = io.StringIO()
    Console(file=out, width=120).print(table({"before": figures, "after": figures}))
    assert f"{label} " in out.getvalue()
    assert "62.5%" in out.getvalue()
    assert "sampled tokens per solved task" in out.getvalue()
    assert "–" in out.getvalue()


def test_one_problem_has_no_interval_and_every_reader_of_it_goes_without() -> None:
    one = evaluation(8, problems=1.0)
    for bound in ("pass_at_1_low", "pass_at_1_high"):
        del one["figures"][bound]
    one["problems"] = {"p": {"samples": 8, "solved": 2}}
    other = {**one, "problems": {"p": {"samples": 8, "solved": 4}}}
    figures = figures_of(one)
    assert figures["ci95"] is None
    gain = paired(one, other, "solved")
    assert gain == {"mean": 0.25, "ci95": None, "problems": 1}
    assert in_points(gain) == "+25.0 points"
    assert verdict(other, one, Trial(1, 8, 0.0)) == (True, "+25.0 points on 1 problems")
    out = io.StringIO()
    Console(file=out, width=120).print(table({"before": figures, "after": figures}))
    assert "30.0%" in out.getvalue()
    assert "[" not in out.getvalue()


def test_an_interval_of_an_earlier_report_on_one_problem_is_no_interval() -> None:
    assert figures_of(evaluation(8, problems=1.0))["ci95"] is None
    assert figures_of(evaluation(8, problems=2.0))["ci95"] == [0.2, 0.4]
