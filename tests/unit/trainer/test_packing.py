"""What is computed once, and that nothing is lost or doubled on the way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import sequences

from services.trainer.packing import form_units, micro_batches, sharing


def test_attempts_of_a_group_share_their_prompt() -> None:
    found = sequences(np.random.default_rng(0), groups=3, attempts=4)
    units = form_units(found, replay=True)
    assert [len(u.sequences) for u in units] == [4, 4, 4]
    assert all(u.prefix == s.context for u in units for s in u.sequences)
    figures = sharing(units, [units])
    assert figures.lost_to_routing == 0
    assert figures.unshared - figures.fed == sum(3 * u.prefix for u in units)


def test_a_prompt_with_other_routing_is_computed_apart_and_the_loss_reported() -> None:
    found = sequences(np.random.default_rng(0), groups=1, attempts=4)
    rows = found[2].experts_TLK.copy()
    rows[1] = (rows[1] + 1) % 4
    found[2] = replace(found[2], experts_TLK=rows)
    units = form_units(found, replay=True)
    assert sorted(len(u.sequences) for u in units) == [1, 3]
    assert sharing(units, [units]).lost_to_routing == units[0].prefix
    assert len(form_units(found, replay=False)) == 1  # without replay the rows do not matter


def test_routing_after_the_prompt_does_not_prevent_sharing() -> None:
    found = sequences(np.random.default_rng(1), groups=1, attempts=2)
    assert len(form_units(found, replay=True)) == 1


def test_equal_prompts_of_different_groups_stay_apart() -> None:
    a = sequences(np.random.default_rng(0), groups=1, attempts=2)
    b = [replace(s, group=1) for s in a]
    assert len(form_units([*a, *b], replay=True)) == 2


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 200))
@settings(max_examples=50, deadline=None)
def test_micro_batches_hold_every_sequence_once_within_the_budget(seed: int, groups: int, budget: int) -> None:
    found = sequences(np.random.default_rng(seed), groups, attempts=5)
    batches = micro_batches(form_units(found, replay=True), budget)
    packed = [s for batch in batches for u in batch for s in u.sequences]
    assert sorted(map(id, packed)) == sorted(map(id, found))
    for batch in batches:
        assert sum(u.fed for u in batch) <= budget or (len(batch) == 1 and len(batch[0].sequences) == 1)
