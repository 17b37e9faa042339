"""Small statistics that several rooms report: bootstrap intervals over problems, seeded, so that figures repeat."""

from __future__ import annotations

import numpy as np

RESAMPLES = 10_000


def bootstrap_mean(values_P: np.ndarray, *, seed: int = 0, level: float = 0.95) -> tuple[float, float, float]:
    """Mean over P problems and its percentile bootstrap interval: (mean, low, high). Raises ValueError on no values."""
    values = np.asarray(values_P, dtype=np.float64)
    if values.size == 0:
        raise ValueError("bootstrap_mean: no values")
    rng = np.random.default_rng(seed)
    # Chunks keep the memory small: 10,000 resamples of thousands of problems need not exist at once.
    means = np.concatenate(
        [values[rng.integers(0, values.size, (500, values.size))].mean(1) for _ in range(RESAMPLES // 500)]
    )
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(values.mean()), float(low), float(high)


def paired_difference(before_P: np.ndarray, after_P: np.ndarray, *, seed: int = 0) -> tuple[float, float, float]:
    """Mean of after - before over the same P problems with its 95 % bootstrap interval over problems."""
    before, after = np.asarray(before_P, dtype=np.float64), np.asarray(after_P, dtype=np.float64)
    if before.shape != after.shape:
        raise ValueError(f"paired_difference: {before.shape} problems before, {after.shape} after; expected the same")
    return bootstrap_mean(after - before, seed=seed)
