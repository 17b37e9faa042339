"""The experiments' picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.behaviour import term
from benchmarks.behaviour.measures import MEASURES, by_run, changed_at, curve
from benchmarks.behaviour.table import Row

COLOURS = {"control": "#246", "term": "#b30", "no-length": "#693", "heavy": "#849"}
NAMES = {
    "control": "control",
    "term": f"{term.NAME} from the line on",
    "no-length": "without length penalty",
    "heavy": "penalty × 10, of all attempts",
}
EVERY = 5  # versions in one point


def draw(rows: Sequence[Row], results: Mapping[str, Any], path: Path) -> None:
    """Write the curves of each part that was measured, with the 95 % intervals of each point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: list[tuple[str, str, tuple[str, ...]]] = []
    if "term" in results:
        panels += [("found", "attempts that end with a new name, %", ("control", "term"))]
        panels += [("solved", "attempts solved, %", ("control", "term"))]
    if "length" in results:
        panels += [("tokens", "sampled tokens per attempt", ("control", "no-length", "heavy"))]
        panels += [("solved", "attempts solved, %", ("control", "no-length", "heavy"))]
    columns = 2
    figure, axes = plt.subplots(
        len(panels) // columns,
        columns,
        figsize=(11, 3.6 * len(panels) / columns),
        squeeze=False,
        constrained_layout=True,
    )
    for axis, (measure, label, arms) in zip(axes.flat, panels, strict=True):
        _panel(axis, rows, measure, label, arms)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(axis: Any, rows: Sequence[Row], measure: str, label: str, arms: Sequence[str]) -> None:
    scale = 1.0 if measure == "tokens" else 100.0
    named: set[str] = set()
    for (arm, _), own in by_run(rows).items():
        if arm not in arms:
            continue
        points = [point for point in curve(own, MEASURES[measure], EVERY) if point[4] >= 5]
        at = [point[0] for point in points]
        axis.plot(
            at,
            [scale * point[1] for point in points],
            color=COLOURS[arm],
            label=NAMES[arm] if arm not in named else None,
        )
        low, high = ([scale * point[i] for point in points] for i in (2, 3))
        axis.fill_between(at, low, high, color=COLOURS[arm], alpha=0.12, linewidth=0)
        named.add(arm)
        if changed_at(own) is not None:
            axis.axvline(min(row.version for row in own if row.later), color=COLOURS[arm], linewidth=0.8, linestyle=":")
    axis.set(xlabel="version (trained steps)", ylabel=label)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize="small")
    axis.spines[["top", "right"]].set_visible(False)
