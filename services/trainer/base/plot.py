"""The curves of a recipe's run as one picture."""

from __future__ import annotations

import json
from pathlib import Path

FIGURES = (
    ("train", "training loss (mixture)"),
    ("action", "dev: loss per action token"),
    ("exact", "dev: all actions of a trace likeliest"),
)


def plot_losses(log: Path, out: Path) -> None:
    """One column per figure; phases follow each other along the minutes of training.

    The dev figures are of traces in the agent's format, which pretraining has not seen: they begin with SFT.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    phases = list(dict.fromkeys(line["phase"] for line in lines))
    figure, axes = plt.subplots(1, len(FIGURES), figsize=(13, 3.8), constrained_layout=True)
    for axis, (name, title) in zip(axes, FIGURES, strict=True):
        offset = 0.0
        for number, phase in enumerate(phases):
            mine = [line for line in lines if line["phase"] == phase]
            label = "mtp (against the main head)" if phase == "mtp" else phase
            if name == "train" or phase != "pretrain":
                minutes = [offset + line["minutes"] for line in mine]
                axis.plot(minutes, [line[name] for line in mine], label=label, color=f"C{number}")
            offset += mine[-1]["minutes"]
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("minutes of training")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)
