"""The results of a scaling study: one table, one picture, and the line of pass@1 after RL against the loss after SFT."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from etude.study.scaling import Level

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 3  # levels, for a line


@dataclass(frozen=True, slots=True)
class LinearFit:
    """pass@1 after RL = intercept + slope · loss after SFT, by least squares. `r2`: None if all levels have the same pass@1."""

    slope: float
    intercept: float
    r2: float | None


def linear_fit(levels: Sequence[Level]) -> LinearFit | None:
    """Fit pass@1 to loss. Return None for fewer than three levels, or if all have the same loss."""
    loss = np.array([one.loss for one in levels])
    after = np.array([one.after for one in levels])
    if len(levels) < LEAST or np.ptp(loss) == 0:
        return None
    slope, intercept = np.polyfit(loss, after, 1)
    total = float(((after - after.mean()) ** 2).sum())
    residual = float(((after - intercept - slope * loss) ** 2).sum())
    return LinearFit(float(slope), float(intercept), 1 - residual / total if total else None)


def markdown(levels: Sequence[Level]) -> str:
    """Return the table and one sentence about it, in Markdown."""
    rows = [
        "| pretraining, tokens | loss after SFT, nats/token | pass@1 before RL | pass@1 after RL | 95 % interval | gain | steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in levels:
        within = "–" if one.interval is None else f"{one.interval[0]:.1%} to {one.interval[1]:.1%}"
        rows.append(
            f"| {one.tokens:,} | {one.loss:.4f} | {one.before:.1%} | {one.after:.1%} | {within} | "
            f"{100 * (one.after - one.before):+.1f} | {one.steps} |"
        )
    return "\n".join([*rows, "", summary(levels), ""])


def summary(levels: Sequence[Level]) -> str:
    """Return one sentence: what a lower loss after SFT was worth after RL."""
    fitted = linear_fit(levels)
    if fitted is None:
        return f"{len(levels)} levels make no line; {LEAST} with different losses do."
    fit = "all have the same pass@1" if fitted.r2 is None else f"R² {fitted.r2:.2f} over {len(levels)} levels"
    return f"A loss lower by 0.1 nats per token goes with {-10 * fitted.slope:+.1f} points of pass@1 after RL ({fit})."


def plot(levels: Sequence[Level]) -> Figure:
    """Loss after SFT over tokens of pretraining; pass@1 before and after RL over the loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    tokens, loss = [one.tokens for one in levels], [one.loss for one in levels]
    left.semilogx(tokens, loss, "o-", color="#246")
    left.set(xlabel="tokens of continued pretraining", ylabel="loss after SFT, nats per token", title="Before RL")
    after = [100 * one.after for one in levels]
    sure = [
        (0.0, 0.0)
        if one.interval is None
        else (100 * (one.after - one.interval[0]), 100 * (one.interval[1] - one.after))
        for one in levels
    ]
    right.errorbar(loss, after, yerr=np.array(sure).T, fmt="o", capsize=4, color="#063", label="after RL")
    right.plot(loss, [100 * one.before for one in levels], "o", color="#b60", label="before RL")
    if fitted := linear_fit(levels):
        ends = np.array([min(loss), max(loss)])
        fit = "" if fitted.r2 is None else f", R² {fitted.r2:.2f}"
        right.plot(
            ends, 100 * (fitted.intercept + fitted.slope * ends), color="#063", alpha=0.5, label=f"least squares{fit}"
        )
    right.invert_xaxis()  # better is right
    right.set(
        xlabel="loss after SFT, nats per token (lower to the right)",
        ylabel="held-out pass@1, %",
        title="After the same RL",
    )
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    plt.close(figure)
    return figure
