"""The plan of a chaos run: repeatable, and fair to every victim."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.report import by_victim, sound
from tests.chaos.schedule import VICTIMS, kills
from tests.chaos.strikes import Outcome


@given(st.integers(0, 10_000), st.integers(0, 120), st.floats(0.1, 60))
def test_the_same_seed_strikes_the_same_and_every_victim_as_often(seed: int, count: int, every_s: float) -> None:
    plan = kills(seed, count, every_s)
    assert plan == kills(seed, count, every_s)
    assert len(plan) == count
    times = Counter({victim: 0 for victim in VICTIMS}) + Counter(kill.victim for kill in plan)
    assert max(times.values(), default=0) - min((times[v] for v in VICTIMS), default=0) <= 1
    assert all(0 <= kill.after_s <= 3 * every_s for kill in plan)


def test_another_seed_strikes_otherwise() -> None:
    assert kills(1, 50, 10) != kills(2, 50, 10)


def test_a_plan_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="every_s 0"):
        kills(1, 5, 0)


def test_who_did_not_come_back_is_counted_and_makes_the_whole_unsound() -> None:
    outcomes = [Outcome("kill", "reward", 2.0), Outcome("kill", "reward", 4.0), Outcome("kill", "reward", 9.0, "late")]
    (row,) = by_victim(outcomes)
    assert (row["number"], row["failed"], row["p50_s"], row["max_s"]) == (3, 1, 3.0, 4.0)
    assert not sound(outcomes[:2], None)
