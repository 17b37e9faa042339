"""How the loss fell: losses.jsonl, the fit of held-out loss against log compute, a table and a picture."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LOSSES = "losses.jsonl"


@dataclass(frozen=True, slots=True)
class Point:
    """`flops`: arithmetic of training before the loss was measured; `run`: which run's."""

    run: str
    phase: str
    flops: float
    tokens: int
    nats: float


@dataclass(frozen=True, slots=True)
class Fit:
    """loss = intercept + slope · log10(flops). `r2`: share of the variance that it explains."""

    slope: float
    intercept: float
    r2: float
    points: int


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Fit loss against log10 of compute, by least squares. `points`: (flops, nats per token). None: fewer than three points of
    different compute above 0, through which any line would seem to fit."""
    usable = [(flops, nats) for flops, nats in points if flops > 0 and math.isfinite(nats)]
    if len({flops for flops, _ in usable}) < 3:
        return None
    x, y = np.log10([flops for flops, _ in usable]), np.asarray([nats for _, nats in usable])
    slope, intercept = np.polyfit(x, y, 1)
    spread = float(((y - y.mean()) ** 2).sum())
    rest = float(((y - (intercept + slope * x)) ** 2).sum())
    return Fit(float(slope), float(intercept), 1 - rest / spread if spread else 1.0, len(usable))


def points(folder: Path) -> dict[str, list[Point]]:
    """Return the held-out losses of a run by the name of the data, in order. Raises OSError."""
    found: dict[str, list[Point]] = {}
    for line in (folder / LOSSES).read_text().splitlines():
        entry = json.loads(line)
        for name, of in entry.get("held_out", {}).items():
            point = Point(folder.name, entry["phase"], entry["flops"], entry["tokens"], of["nats_per_token"])
            found.setdefault(name, []).append(point)
    return found


def said(name: str, found: Sequence[Point]) -> str:
    """Return the fit in words."""
    line = fit([(point.flops, point.nats) for point in found])
    if line is None:
        return f"{name}: fewer than three measurements after a step; no fit of loss against compute"
    return (
        f"{name}: loss = {line.intercept:.3f} {'-' if line.slope < 0 else '+'} {abs(line.slope):.4f} · log10(FLOP), "
        f"R² {line.r2:.3f} over {line.points} measurements"
    )


def markdown(by_name: Mapping[str, Sequence[Point]]) -> str:
    """Return the table of all measurements, and the fits below it."""
    rows = [
        f"| {name} | {point.run} | {point.phase} | {point.tokens:,} | {point.flops:.3g} | {point.nats:.4f} |"
        for name, found in by_name.items()
        for point in found
    ]
    head = "| held out | run | phase | tokens trained | FLOP | nats per token |\n|---|---|---|---|---|---|"
    fits = "\n".join(f"- {said(name, found)}" for name, found in by_name.items())
    return "\n".join([head, *rows]) + f"\n\n{fits}\n"


def plot(by_name: Mapping[str, Sequence[Point]], out: Path) -> None:
    """Draw held-out loss against compute, and each fit. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for number, (name, found) in enumerate(by_name.items()):
        after = [point for point in found if point.flops > 0]
        x, y = [point.flops for point in after], [point.nats for point in after]
        axis.scatter(x, y, color=f"C{number}", s=18, label=name)
        line = fit(list(zip(x, y, strict=True)))
        if line is not None:
            ends = np.array([min(x), max(x)])
            axis.plot(ends, line.intercept + line.slope * np.log10(ends), color=f"C{number}", alpha=0.6)
    axis.set_xscale("log")
    axis.set_xlabel("FLOP of training")
    axis.set_ylabel("held-out loss, nats per token")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def entry(**facts: Any) -> str:
    return json.dumps(facts) + "\n"
