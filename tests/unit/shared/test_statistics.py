import numpy as np
import pytest

from shared.statistics import bootstrap_mean, contrast, of_means, paired_difference


def normal(mean: float, seed: int, size: int = 400) -> np.ndarray:
    return np.random.default_rng(seed).normal(mean, 1.0, size)


def test_a_contrast_is_the_weighted_sum_of_means_within_its_interval() -> None:
    a, b = normal(0.0, 1), normal(1.0, 2)
    value, low, high = contrast([a, b], [-1, 1])
    assert value == pytest.approx(b.mean() - a.mean())
    assert low < value < high
    # The width of a normal interval for two independent means.
    assert high - low == pytest.approx(2 * 1.96 * np.hypot(a.std() / 20, b.std() / 20), rel=0.1)


def test_a_difference_in_differences_takes_the_drift_away() -> None:
    before, after = normal(0.0, 1), normal(3.0, 2)
    value, low, high = contrast([before, after, before, after], [-1, 1, 1, -1])
    assert value == pytest.approx(0.0, abs=1e-12)
    assert low < 0 < high


def test_a_contrast_of_an_empty_sample_names_the_sizes() -> None:
    with pytest.raises(ValueError, match=r"\[400, 0\]"):
        contrast([normal(0, 1), np.array([])], [-1, 1])


def test_a_ratio_of_means_keeps_its_rows_together() -> None:
    tokens = np.random.default_rng(3).uniform(10, 90, 300)
    value, low, high = of_means(np.stack([tokens, 2 * tokens], 1), lambda m: m[:, 0] / m[:, 1])
    assert (value, low, high) == pytest.approx((0.5, 0.5, 0.5))


def test_resamples_without_a_finite_ratio_are_left_out() -> None:
    table = np.array([[10.0, 0.0]] * 5 + [[10.0, 1.0]])
    value, low, high = of_means(table, lambda m: m[:, 0] / m[:, 1])
    assert value == pytest.approx(60.0)
    assert np.isfinite([low, high]).all()
    assert np.isnan(of_means(table[:5], lambda m: m[:, 0] / m[:, 1])[1:]).all()


def test_figures_repeat_and_depend_on_the_seed() -> None:
    values = normal(0.0, 4)
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(values) != bootstrap_mean(values, seed=1)
    assert paired_difference(values, values) == (0.0, 0.0, 0.0)
