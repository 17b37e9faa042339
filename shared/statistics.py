"""Small statistics that several rooms report: bootstrap intervals over problems, seeded, so that figures repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 10_000
CHUNK = 500  # keeps the memory small: 10,000 resamples of thousands of problems need not exist at once


def bootstrap_mean(values_P: np.ndarray, *, seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """Mean over P problems and its percentile bootstrap interval: (mean, low, high). Raises ValueError on no values."""
    values = np.asarray(values_P, dtype=np.float64)
    if values.size == 0:
        raise ValueError("bootstrap_mean: no values")
    low, high = _interval(_means(values, np.random.default_rng(seed)), level)
    return float(values.mean()), low, high


def paired_difference(before_P: np.ndarray, after_P: np.ndarray, *, seed: int = 0) -> tuple[float, float, float]:
    """Mean of after - before over the same P problems with its 95 % bootstrap interval over problems."""
    before, after = np.asarray(before_P, dtype=np.float64), np.asarray(after_P, dtype=np.float64)
    if before.shape != after.shape:
        raise ValueError(f"paired_difference: {before.shape} problems before, {after.shape} after; expected the same")
    return bootstrap_mean(after - before, seed=seed)


def contrast(
    samples: Sequence[np.ndarray], weights: Sequence[float], *, seed: int = 0, level: float = 0.95
) -> tuple[float, float, float]:
    """Weighted sum of the means of independent samples with its bootstrap interval: (value, low, high).

    A difference: weights -1, 1. A difference in differences of (before, after, control before, control after): -1, 1, 1, -1.
    Raises ValueError where a sample is empty."""
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if not arrays or any(array.size == 0 for array in arrays):
        raise ValueError(f"contrast: samples of {[array.size for array in arrays]} values; expected some in each")
    rng = np.random.default_rng(seed)
    drawn = sum(weight * _means(array, rng) for array, weight in zip(arrays, weights, strict=True))
    value = sum(weight * float(array.mean()) for array, weight in zip(arrays, weights, strict=True))
    low, high = _interval(np.asarray(drawn), level)
    return float(value), low, high


def of_means(
    values_PC: np.ndarray, function: Callable[[np.ndarray], np.ndarray], *, seed: int = 0, level: float = 0.95
) -> tuple[float, float, float]:
    """A function of the means of C columns with its bootstrap interval over the P rows, which stay together: (value, low, high).

    `function` takes means [R, C] and returns [R]. Resamples in which it is not finite (a ratio to 0) are left out. Raises
    ValueError where there is no row."""
    values = np.asarray(values_PC, dtype=np.float64)
    if values.ndim != 2 or len(values) == 0:
        raise ValueError(f"of_means: values of shape {values.shape}; expected [P, C] with P > 0")
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = function(_means(values, np.random.default_rng(seed)))
        value = float(function(values.mean(0)[None])[0])
    finite = drawn[np.isfinite(drawn)]
    low, high = _interval(finite, level) if finite.size else (float("nan"), float("nan"))
    return value, low, high


def _means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Means of RESAMPLES resamples of the first axis."""
    size = len(values)
    return np.concatenate([values[rng.integers(0, size, (CHUNK, size))].mean(1) for _ in range(RESAMPLES // CHUNK)])


def _interval(means: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
