"""What may be told about an attempt, in whatever order and however often, leads to the same place."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shared.ledger.transitions import ENDS, GROUP_MOVES, LIVE, RANK, AttemptState, GroupState, Place, move, settle

places = st.builds(Place, st.integers(0, 3), st.sampled_from(AttemptState))
live_places = st.builds(Place, st.integers(0, 3), st.sampled_from(sorted(LIVE)))


@given(st.lists(places, max_size=12), st.randoms(use_true_random=False))
def test_any_order_and_any_repetition_end_in_the_same_place(told: list[Place], luck: random.Random) -> None:
    shuffled = told + luck.choices(told, k=len(told)) if told else []
    luck.shuffle(shuffled)
    assert settle(shuffled) == settle(told)


@given(places, places, places)
def test_moves_commute_associate_and_repeat_without_effect(a: Place, b: Place, c: Place) -> None:
    assert move(a, b) == move(b, a)
    assert move(move(a, b), c) == move(a, move(b, c))
    assert move(a, a) == a


@given(st.integers(0, 3), st.sampled_from(sorted(LIVE)), st.sampled_from(sorted(LIVE)))
def test_a_later_state_implies_the_earlier_ones(epoch: int, a: AttemptState, b: AttemptState) -> None:
    later = max(a, b, key=lambda s: RANK[s])
    assert settle([Place(epoch, a), Place(epoch, b)], Place(epoch, AttemptState.requested)) == Place(epoch, later)


@given(live_places, live_places)
def test_an_older_epoch_changes_nothing(at: Place, told: Place) -> None:
    if told.epoch < at.epoch:
        assert move(at, told) == at


@given(st.sampled_from(sorted(ENDS)), live_places, st.integers(0, 3))
def test_nothing_leaves_an_end(end: AttemptState, told: Place, epoch: int) -> None:
    assert move(Place(epoch, end), told) == Place(epoch, end)


def test_a_verdict_counts_even_if_its_epoch_was_called_lost_before_it_was_given_again() -> None:
    assert move(Place(0, AttemptState.lost), Place(0, AttemptState.scored)).state is AttemptState.scored
    again = move(Place(0, AttemptState.lost), Place(1, AttemptState.requested))
    assert move(again, Place(0, AttemptState.scored)) == again


def test_every_state_of_a_group_says_where_it_may_go() -> None:
    assert set(GROUP_MOVES) == {*GroupState}
    assert all(target is not state for state, targets in GROUP_MOVES.items() for target in targets)
