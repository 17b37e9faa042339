"""Problems weigh most where groups teach."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.hardness import FIRST_GROUPS, FLOOR, LEAST, Hardness, Outcome


def taught(rates: dict[str, float], groups: int = 12, turns: float = 3.0) -> Hardness:
    """Every cell has been practised with `groups` groups of 8 at its pass rate."""
    hardness = Hardness()
    for _ in range(groups):
        for cell, rate in rates.items():
            hardness.observe(Outcome("debugging", cell, 8, round(8 * rate), turns, 20.0, 0))
    return hardness


def weights(hardness: Hardness, cells: list[str], step: int = 10) -> np.ndarray:
    return hardness.weights(["debugging"] * len(cells), cells, step=step)


def test_the_weight_peaks_where_attempts_of_a_group_differ() -> None:
    rates = {"hopeless": 0.0, "hard": 0.25, "even": 0.5, "easy": 0.875, "solved": 1.0}
    hopeless, hard, even, easy, solved = weights(taught(rates), list(rates))
    assert even > easy > solved
    assert hard > hopeless
    assert hard > 3 * hopeless
    assert even > 3 * solved


def test_what_two_tags_promise_is_known_of_problems_that_have_both() -> None:
    """Learnt apart: "easy" with "near" and "far", "hard" with "near" only."""
    hardness = Hardness()
    for _ in range(40):
        for category, solved in (("easy/near", 7), ("easy/far", 4), ("hard/near", 4)):
            hardness.observe(Outcome(category, "", 8, solved, 3.0, 10.0, 0))
    near, far, both = hardness.expected(["easy/near", "easy/far", "hard/far"])
    assert near > far > both
    assert both < 0.25


def test_later_stages_prefer_the_harder_of_two_that_teach_alike() -> None:
    hardness = taught({"harder": 0.375, "easier": 0.625})
    early, late = (weights(hardness, ["harder", "easier"], step=s) for s in (0, 100))
    assert late[0] / late[1] > early[0] / early[1]
    assert late[0] > late[1]


def test_relatives_that_nobody_tried_are_probed() -> None:
    hopeless, unknown = weights(taught({"hopeless": 0.0, "even": 0.5}), ["hopeless", "unknown"])
    assert unknown > 2 * hopeless


def test_more_turns_and_thinking_count_as_harder() -> None:
    hardness = Hardness()
    for _ in range(8):
        hardness.observe(Outcome("debugging", "quick", 8, 4, 2.0, 10.0, 0))
        hardness.observe(Outcome("debugging", "long", 8, 4, 8.0, 60.0, 0))
    a, b = hardness.posterior(["debugging"] * 2, ["quick", "long"])
    quick, long = a / (a + b)
    assert long < 0.45 < 0.55 < quick


def test_old_results_fade_as_the_policy_moves_on() -> None:
    hardness = taught({"cell": 0.0})
    before = (lambda a, b: a / (a + b))(*hardness.posterior(["debugging"], ["cell"]))[0]
    for _ in range(12):
        hardness.observe(Outcome("debugging", "cell", 8, 8, 3.0, 20.0, 200))
    after = (lambda a, b: a / (a + b))(*hardness.posterior(["debugging"], ["cell"]))[0]
    assert before < 0.1
    assert after > 0.8


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8), st.floats(0, 20), st.integers(0, 99)), max_size=40)
)
def test_weights_are_always_positive_and_finite(rows: list[tuple[str, int, float, int]]) -> None:
    hardness = Hardness()
    for cell, solved, turns, step in rows:
        hardness.observe(Outcome("c", cell, 8, solved, turns, 2 * turns, step))
    found = hardness.weights(["c"] * 5, list("abcde"), step=50)
    assert np.isfinite(found).all()
    assert (found >= FLOOR * found.max()).all()
    assert found.min() > 0


@settings(max_examples=50)
@example([("a/near", "x", 0, 1.0, 0.0, 0)] * 3)  # less than LEAST
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a/near", "a/far", "b/near", "b"]),
            st.sampled_from(["x", "y", "z"]),
            st.integers(0, 8),
            st.floats(1, 6),
            st.floats(0, 200),
            st.integers(0, 60),
        ),
        max_size=30,
    )
)
def test_the_reasons_multiply_up_to_the_estimate(outcomes: list[tuple[str, str, int, float, float, int]]) -> None:
    hardness = Hardness()
    for category, cell, solved, turns, thinking, step in outcomes:
        hardness.observe(Outcome(category, cell, 8, solved, turns, thinking, step))
    for category in ("a/near", "b/far", "new"):
        for cell in ("x", "unknown"):
            a, b = hardness.posterior([category], [cell])
            odds = np.prod([factor.odds for factor in hardness.explain(category, cell)])
            chance = np.clip(odds / (1 + odds), LEAST, 1 - LEAST)
            assert a[0] / (a[0] + b[0]) == pytest.approx(chance, rel=1e-6)


def test_what_the_first_policy_would_solve_is_known_after_its_groups_and_moves_no_more() -> None:
    """The share solved of each kind stays what it was; a policy that learns meets harder kinds, and its gain shows all the same."""
    hardness, rates = Hardness(), {"easy": 6, "hard": 2}
    for i in range(FIRST_GROUPS):
        kind = ("easy", "hard")[i % 2]
        assert hardness.chance_at_first(kind, "new") is None
        hardness.observe(Outcome(kind, f"{kind}-{i}", 8, rates[kind], 3.0, 0.0, i // 16))
    first = {kind: hardness.chance_at_first(kind, "new") for kind in rates}
    assert first == {"easy": pytest.approx(6 / 8, abs=0.05), "hard": pytest.approx(2 / 8, abs=0.05)}
    for i in range(FIRST_GROUPS, 2 * FIRST_GROUPS):
        hardness.observe(Outcome("hard", f"hard-{i}", 8, 4, 3.0, 0.0, i // 16))
    assert {kind: hardness.chance_at_first(kind, "new") for kind in rates} == first
    assert hardness.chance(["hard"], ["new"])[0] > 0.4
