"""Gains by kind of problem."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from etude.demo.by_kind import FEWEST, OTHERS, by_kind, kinds_of, table
from shared.objects import connect
from shared.problems import pack
from shared.problems.schema import Case, FunctionProblem


def test_a_kind_that_was_unlearned_stands_out_and_small_kinds_are_told_together() -> None:
    names = {
        kind: [f"{kind}-{i}" for i in range(n)] for kind, n in (("return", 20), ("string", 30), ("slice", FEWEST - 1))
    }
    kinds = {name: kind for kind, group in names.items() for name in group}
    before = dict.fromkeys(kinds, 0.5)
    after = {name: {"return": 0.25, "string": 0.75, "slice": 0.5}[kind] for name, kind in kinds.items()}
    found = by_kind(before, {**after, "only after": 1.0}, kinds)
    assert list(found) == ["string", "return", OTHERS]
    assert found["return"] == {"problems": 20, "before": 0.5, "after": 0.25, "gain": -0.25, "ci95": [-0.25, -0.25]}
    assert found[OTHERS]["problems"] == FEWEST - 1
    out = io.StringIO()
    Console(file=out, width=120).print(table(found))
    assert "-25.0 [-25.0, -25.0]" in out.getvalue()


def test_one_problem_has_no_interval() -> None:
    assert by_kind({"a": 0.0}, {"a": 1.0}, {})[OTHERS] == pytest.approx(
        {"problems": 1, "before": 0.0, "after": 1.0, "gain": 1.0, "ci95": None}
    )


def test_the_kind_is_the_last_part_of_the_category(tmp_path: Path) -> None:
    objects = connect(f"file:{tmp_path}")
    problems = [
        FunctionProblem(
            id=id,
            category=category,
            files={"a.py": "def f(): pass"},
            entry="f",
            visible=[Case(args="[]", expected="1")],
        )
        for id, category in (("p-1", "debugging/return"), ("p-2", "mine"))
    ]
    ref = objects.put("pack", pack.write(problems))
    assert kinds_of(objects, ref) == {"p-1": "return", "p-2": "mine"}
