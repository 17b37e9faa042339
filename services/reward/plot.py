"""The length penalty as a picture: its curve, and where a run's attempts lie on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shared.contracts.run import LengthPenalty
from shared.length import cost

POINTS = 200  # of the curve
MARGIN = 1.15  # of the largest effort that is drawn


class Spent(NamedTuple):
    """One attempt: its effort in units, and whether it was solved."""

    units: float
    solved: bool


def plot_length(length: LengthPenalty, attempts: Sequence[Spent], out: Path, *, title: str) -> None:
    """Draw x against the penalty, weight * C(x). `attempts`: empty: the curve alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    most = max((one.units for one in attempts), default=16.0) * MARGIN or 1.0
    x = np.linspace(0.0, most, POINTS)
    figure, axes = plt.subplots(2 if attempts else 1, 1, figsize=(8, 6 if attempts else 4), sharex=True, squeeze=False)
    curve = axes[0][0]
    curve.plot(x, [_price(length, float(units)) for units in x], color="C0", label=f"{length.weight:g} · C(x)")
    curve.plot(x, length.weight * x, color="0.7", linestyle=":", label="linear: every unit costs as the first")
    curve.set_ylim(0.0, max(_price(length, most) * 1.25, 1e-9))
    curve.set_ylabel("subtracted from the reward")
    curve.set_title(title, fontsize=10)
    curve.grid(alpha=0.3)
    for solved, color, label in ((False, "C3", "not solved"), (True, "C2", "solved")):
        units = [one.units for one in attempts if one.solved is solved]
        if units:
            charged = solved or length.apply == "all"
            told = f"{label} ({len(units)})" + ("" if charged else ", not charged")
            prices = [_price(length, one) for one in units]
            curve.scatter(units, prices, s=9, alpha=0.35 if charged else 0.12, color=color, label=told)
            axes[1][0].hist(units, bins=40, range=(0.0, most), alpha=0.5, color=color)
    curve.legend(fontsize=8)
    if attempts:
        axes[1][0].set_ylabel("attempts")
        axes[1][0].grid(alpha=0.3)
    axes[-1][0].set_xlabel(f"effort x (1 unit = {length.unit_tokens:g} weighted tokens; calls and turns added)")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _price(length: LengthPenalty, units: float) -> float:
    return length.weight * cost(units, length.k, length.q)
