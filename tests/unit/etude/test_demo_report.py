"""The names in report.json: each says what it holds."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from etude.demo.report import figures_of, table

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
