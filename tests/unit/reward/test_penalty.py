"""The price of effort: increasing, concave, 1 for the first unit, one family over q."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.reward.penalty import check
from shared.contracts.messages import Effort
from shared.contracts.run import LengthPenalty
from shared.length import cost, effort_units, length_penalty

xs = st.floats(0, 1e6)
ks = st.floats(1e-6, 100)
qs = st.floats(0, 4)


def formula(x: float, k: float, q: float) -> float:
    return ((1 + k * x) ** (1 - q) - 1) / (k * (1 - q))


@given(st.floats(0, 1e4), st.floats(0.01, 10), qs)
def test_cost_is_the_formula_of_the_recipe(x: float, k: float, q: float) -> None:
    assume(abs(1 - q) > 0.01)
    assert cost(x, k, q) == pytest.approx(formula(x, k, q), rel=1e-6, abs=1e-9)


@given(xs, ks)
def test_the_named_cases(x: float, k: float) -> None:
    assert cost(x, k, 0.0) == pytest.approx(x, rel=1e-9)
    assert cost(x, k, 1.0) == pytest.approx(math.log1p(k * x) / k)
    assert cost(x, 0.0, 1.0) == x
    assert cost(1e300, k, 2.0) == pytest.approx(1 / k)


@given(xs, xs, ks, qs)
def test_cost_increases(a: float, b: float, k: float, q: float) -> None:
    assume(a < b)
    assert cost(a, k, q) <= cost(b, k, q) * (1 + 1e-14)  # once saturated, the last digit is rounding's


@given(st.floats(0, 1e4), st.floats(1e-3, 1e3), ks, qs)
def test_cost_is_concave(x: float, step: float, k: float, q: float) -> None:
    left, middle, right = (cost(x + i * step, k, q) for i in range(3))
    assert middle >= (left + right) / 2 - 1e-9 * max(1.0, middle)


@given(ks, qs)
def test_the_first_unit_of_effort_costs_one(k: float, q: float) -> None:
    assert cost(0.0, k, q) == 0.0
    assert cost(1e-9 / k, k, q) * k / 1e-9 == pytest.approx(1.0, rel=1e-6)


@given(xs, ks, st.floats(1e-12, 1e-7))
def test_cost_is_continuous_at_q_one(x: float, k: float, d: float) -> None:
    assert cost(x, k, 1 - d) == pytest.approx(cost(x, k, 1.0), rel=1e-5)
    assert cost(x, k, 1 + d) == pytest.approx(cost(x, k, 1.0), rel=1e-5)


def test_effort_counts_every_role_call_and_turn() -> None:
    effort = Effort(
        thinking_tokens=64, tool_call_tokens=32, tool_output_tokens=64, final_tokens=32, tool_calls=3, turns=2
    )
    assert effort_units(effort, LengthPenalty()) == pytest.approx((64 + 32 + 32 + 32) / 64 + 0.3 + 0.2)
    assert effort_units(Effort(prompt_tokens=1000), LengthPenalty()) == 0.0
    assert length_penalty(effort, LengthPenalty(weight=0.0)) == 0.0


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"q": -0.1}, "reward.length.q: found -0.1"),
        ({"k": math.inf}, "reward.length.k: found inf"),
        ({"unit_tokens": 0.0}, "reward.length.unit_tokens: found 0.0"),
        ({"token_weights": {"thoughts": 1.0}}, "found 'thoughts' = 1.0; allowed: .* thinking, tool_call"),
    ],
)
def test_a_configuration_outside_the_family_is_refused_by_name(change: dict[str, object], found: str) -> None:
    check(LengthPenalty())
    with pytest.raises(ValueError, match=found):
        check(msgspec.structs.replace(LengthPenalty(), **change))
