"""Ages along the tree of incarnations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.trainer.lineage import Fork, age, distance

# 0 ran to step 9; 1 continued it from 4 and ran to 8; 2 continued 0 from 6; 3 continued 1 from 7.
FORKS = {0: Fork(-1, 0), 1: Fork(0, 4), 2: Fork(0, 6), 3: Fork(1, 7)}


def test_on_one_line_age_is_the_difference_of_steps() -> None:
    assert age(FORKS, 0, 1, (0, 0)) == 0  # sampled by the very weights that the step starts from
    assert age(FORKS, 0, 5, (0, 2)) == 2
    assert age(FORKS, 1, 6, (0, 3)) == 2  # before the fork the parent's steps are ours
    assert age(FORKS, 3, 9, (0, 2)) == 6  # through two forks
    assert age(FORKS, 3, 9, (1, 6)) == 2


def test_a_token_of_a_dead_step_is_as_old_as_the_way_back_and_forward() -> None:
    """(t - f) + (s - f) for a token of dead step s > f."""
    assert age(FORKS, 1, 6, (0, 7)) == (5 - 4) + (7 - 4)
    assert age(FORKS, 2, 8, (1, 6)) == (7 - 4) + (6 - 4)  # cousins part where the older fork was
    assert age(FORKS, 3, 9, (0, 9)) == (8 - 4) + (9 - 4)


def test_the_step_forked_from_belongs_to_both() -> None:
    assert age(FORKS, 1, 5, (0, 4)) == 0
    assert age(FORKS, 1, 5, (1, 4)) == 0  # the base that the new incarnation published


def test_a_version_ahead_on_our_own_line_has_a_negative_age() -> None:
    assert age(FORKS, 0, 3, (0, 5)) == -3


def test_unknown_incarnations_share_the_base_policy_alone() -> None:
    assert distance({}, (5, 3), (2, 4)) == 7


@given(st.integers(0, 3), st.integers(0, 10), st.integers(0, 3), st.integers(0, 10))
def test_between_two_lines_the_way_is_as_long_in_both_directions(a: int, s: int, b: int, t: int) -> None:
    assert abs(distance(FORKS, (a, s), (b, t))) == abs(distance(FORKS, (b, t), (a, s)))
