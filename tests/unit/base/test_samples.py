from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.base.samples import Sample, Samples, Weight, batches

lengths_of = st.lists(st.integers(1, 90), min_size=4, max_size=300).map(np.array)


def make(lengths: list[int]) -> Samples:
    return Samples.of(Sample(list(range(7, 7 + n)), [n % 3] * n) for n in lengths)


@settings(max_examples=60, deadline=None)
@given(lengths_of, st.integers(90, 400), st.integers(1, 3), st.integers(0, 5))
def test_batches_stay_within_the_budget_and_an_epoch_repeats_nothing(
    lengths: np.ndarray, tokens: int, ranks: int, seed: int
) -> None:
    seen: set[int] = set()
    for step in islice(batches(lengths, tokens, ranks, seed), 3):
        assert len(step) == ranks
        for part in step:
            assert len(part) * lengths[part].max() <= tokens or len(part) == 1 or len(lengths) <= 3 * ranks
    for step in islice(batches(lengths, tokens, ranks, seed), 1):
        chosen = [int(i) for part in step for i in part]
        assert len(chosen) == len(set(chosen))
        seen.update(chosen)


def test_equal_seeds_give_equal_batches_and_others_do_not() -> None:
    lengths = np.arange(10, 200)

    def first(seed: int) -> list[list[int]]:
        return [part.tolist() for step in islice(batches(lengths, 400, 2, seed), 20) for part in step]

    assert first(1) == first(1) != first(2)


def test_too_few_samples_for_the_processes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one per process"):
        next(batches(np.array([5]), 100, 2, 1))


def test_samples_survive_saving_joining_and_choosing(tmp_path: Path) -> None:
    samples = make([3, 5, 8, 2])
    samples.save(tmp_path / "s.npz")
    loaded = Samples.load(tmp_path / "s.npz")
    joined = Samples.joined([loaded, make([4])])
    assert joined.lengths.tolist() == [3, 5, 8, 2, 4]
    chosen = joined.chosen(np.array([4, 1]))
    assert chosen.lengths.tolist() == [4, 5]
    assert chosen.tokens.tolist() == [7, 8, 9, 10, 7, 8, 9, 10, 11]
    assert len(joined.take(3, seed=1)) == 3


def test_rows_are_padded_on_the_right_and_padding_weighs_nothing() -> None:
    tokens, weights = make([2, 4]).rows(np.array([0, 1]))
    assert tokens.tolist() == [[7, 8, 0, 0], [7, 8, 9, 10]]
    assert weights.tolist() == [[2, 2, 0, 0], [1, 1, 1, 1]]
    assert Weight.none == 0
