"""The figures of benchmarks.behaviour, from rows whose truth is known, and its term."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.behaviour import __main__ as command
from benchmarks.behaviour import arms, measures, table, term
from benchmarks.behaviour.runs import write_package
from benchmarks.behaviour.table import Row
from shared.plugins import Plugins
from shared.terms import Made, Seen, Turn

SECONDS, CHANGE, GROUPS = 300.0, 120.0, 240


def run_of(
    arm: str,
    seed: int,
    found: Callable[[float], float],
    *,
    changes: bool = False,
    tokens: float = 50.0,
    solved: float = 0.3,
) -> list[Row]:
    """Rows of a run. `found`: seconds -> chance that the term finds something. Half of an attempt's chance is its problem's."""
    rng = np.random.default_rng([seed, *arm.encode()])

    def rows() -> Iterator[Row]:
        for draw in range(GROUPS):
            at = SECONDS * draw / GROUPS
            for _ in range(8):
                yield Row(
                    arm, seed, f"g{draw}", f"p{draw}", draw, draw // 4, at, changes and at >= CHANGE,
                    bool(rng.random() < solved), float(rng.random() < found(at)), int(rng.poisson(tokens)), 6, 4, 0.0,
                )  # fmt: skip

    return list(rows())


def drifting(at: float) -> float:
    return 0.6 - 0.1 * at / SECONDS


def reacting(at: float) -> float:
    return drifting(at) - (0.3 if at > CHANGE else 0.0)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [
        *run_of("term", 0, reacting, changes=True),
        *run_of("control", 0, drifting),
        *run_of("no-length", 0, drifting, tokens=70.0),
    ]


def test_the_effect_of_a_term_is_its_change_less_the_drift_of_the_control(rows: list[Row]) -> None:
    found = command.results("term", rows)["term"]["seeds"]["0"]
    assert found["change_s"] == CHANGE
    value, low, high = found["found"]["effect"]
    assert low < -0.3 < high < 0
    assert value == pytest.approx(found["found"]["change"][0] - found["found"]["control_change"][0])
    assert found["solved"]["effect"][1] < 0 < found["solved"]["effect"][2]  # nothing happened to the passes


def test_a_run_that_only_drifts_shows_no_effect() -> None:
    treated, control = run_of("term", 0, drifting, changes=True), run_of("control", 0, drifting)
    _, low, high = measures.term_effect(treated, [control])["found"]["effect"]
    assert low < 0 < high


def test_without_a_control_the_change_is_told_and_no_effect() -> None:
    found = measures.term_effect(run_of("term", 0, reacting, changes=True), [])["found"]
    assert found["change"][2] < 0
    assert found["effect"] is None


def test_a_run_that_was_never_reconfigured_is_named_and_the_others_count(rows: list[Row]) -> None:
    found = command.results("term", [*rows, *run_of("term", 1, drifting)])["term"]
    assert "no group" in found["seeds"]["1"]["error"]
    assert found["effect"]["seeds"] == 1


def test_tokens_per_solved_are_compared_on_the_same_problems(rows: list[Row]) -> None:
    found = command.results("length", rows)["length"]["control"]["all"]
    assert found["problems"] == pytest.approx(GROUPS / 2, abs=1)  # the last half
    _, low, high = found["tokens"]
    assert low < 50 / 70 - 1 < high
    assert found["tokens_per_solved"][1] < found["tokens_per_solved"][0] < found["tokens_per_solved"][2] < 0.2
    assert found["solved"][1] < 0 < found["solved"][2]


def test_runs_that_share_no_problem_are_not_compared(rows: list[Row]) -> None:
    other = [dataclasses.replace(row, problem=f"x{row.problem}") for row in rows if row.arm == "no-length"]
    with pytest.raises(ValueError, match="share no problem"):
        measures.length_effect([([row for row in rows if row.arm == "control"], other)])


def test_attempts_without_an_answer_are_left_out() -> None:
    quarantined = [dataclasses.replace(row, found=-1.0) for row in run_of("control", 0, drifting)[:8]]
    assert len(measures.group_means(quarantined, (0, SECONDS), measures.MEASURES["found"])) == 0


def test_a_table_survives_the_file(rows: list[Row], tmp_path: Path) -> None:
    table.write(tmp_path / "t.csv.gz", rows)
    rounded = [dataclasses.replace(row, seconds=round(row.seconds, 4)) for row in rows]
    assert table.load(tmp_path / "t.csv.gz") == rounded
    (tmp_path / "t.csv.gz").write_bytes(b"no table")
    with pytest.raises(ValueError, match="no table of attempts"):
        table.load(tmp_path / "t.csv.gz")


def test_the_runs_that_decide_most_come_first_and_none_comes_twice() -> None:
    planned = command.told("both", (0, 1, 2), (0, 1))
    assert [arm.name for arm, _ in planned[:3]] == ["term"] * 3
    assert len({(arm.name, seed) for arm, seed in planned}) == len(planned) == 9


def change(old: str, new: str, *, ok: bool = True) -> Made:
    return Made(0, "edit", "changes", {"line": 1, "old": old, "new": new}, ok, "")


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (" latest", " inst", ["inst"]),
        (" ==", " !=", []),
        (" and", " or", []),
        ("fields[0", "fields[1", []),
        ("x", "x + len(größe)", ["len", "größe"]),
        (" 0", " 1e5", []),
    ],
)
def test_the_term_counts_names_that_a_change_writes_and_does_not_replace(old: str, new: str, names: list[str]) -> None:
    assert term.new_names(change(old, new)) == names


def test_the_term_looks_at_the_last_change_that_could_be_applied() -> None:
    def seen(*calls: Made) -> Seen:
        nothing: Any = None
        return Seen(nothing, {}, read=lambda: [Turn(0, "", calls, "")])

    assert term.find(seen(change("a", "b"), change("+", "-"))).amount == 0
    assert term.find(seen(change("+", "-"), change("a", "b"))).amount == 1
    assert term.find(seen(change("+", "-"), change("a", "b", ok=False))).amount == 0
    assert term.find(seen()).amount == 0


def test_the_term_is_found_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert Plugins("etude.reward_terms", {}).load(term.NAME) is term.find
    assert arms.TERM.later is not None
    assert arms.TERM.later["reward"]["id"] != arms.TERM.start["reward"]["id"]
