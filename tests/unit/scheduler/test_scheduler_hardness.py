"""Problems are drawn where groups teach, never twice, and the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.scheduler.hardness import FLOOR, LEAST, Hardness, Outcome, draw, fingerprints


def taught(rates: dict[str, float], groups: int = 12, turns: float = 3.0) -> Hardness:
    """Every cell has been practised with `groups` groups of 8 at its pass rate."""
    hardness = Hardness()
    for _ in range(groups):
        for cell, rate in rates.items():
            hardness.observe(Outcome("debugging", cell, 8, round(8 * rate), turns, 20.0, 0))
    return hardness


def weights(hardness: Hardness, cells: list[str], step: int = 0) -> np.ndarray:
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


@given(st.integers(0, 200), st.integers(0, 50), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_draw_never_repeats_and_is_the_same_for_the_same_seed(size: int, count: int, seed: int, number: int) -> None:
    prints = fingerprints([f"p{i}" for i in range(size)])
    chances = np.linspace(0.1, 1.0, size)
    first = draw(chances, prints, count, seed=seed, number=number)
    assert len(set(first.tolist())) == len(first) == min(size, count)
    assert (first == draw(chances, prints, count, seed=seed, number=number)).all()


@given(st.permutations(range(30)), st.integers(0, 1000))
def test_a_draw_does_not_depend_on_the_order_of_admission(order: list[int], seed: int) -> None:
    names = [f"p{i}" for i in range(30)]
    chances = np.linspace(0.1, 1.0, 30)
    straight = [names[i] for i in draw(chances, fingerprints(names), 10, seed=seed, number=1)]
    mixed = [names[i] for i in order]
    other = [mixed[i] for i in draw(chances[list(order)], fingerprints(mixed), 10, seed=seed, number=1)]
    assert straight == other


def test_problems_are_drawn_in_proportion_to_their_weights() -> None:
    prints = fingerprints([f"p{i}" for i in range(40)])
    chances = np.where(np.arange(40) < 20, 1.0, 4.0)
    heavy = sum(int((draw(chances, prints, 1, seed=1, number=n) >= 20).sum()) for n in range(4000))
    assert heavy / 4000 == pytest.approx(0.8, abs=0.03)


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
