"""Predicted against actual solve rate as a picture."""

from __future__ import annotations

import io

from services.scheduler.calibration import Report


def reliability(found: Report, name: str) -> bytes:
    """Return a PNG: of each bin the predicted against the solved share, the larger the more attempts it is of. On the diagonal
    the estimate is right. `name`: of the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: only who draws waits for it
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="as predicted")
    most = max((one.attempts for one in found.bins), default=1)
    axes.plot([b.predicted for b in found.bins], [b.solved for b in found.bins], color="tab:blue", linewidth=1)
    axes.scatter(
        [b.predicted for b in found.bins],
        [b.solved for b in found.bins],
        s=[20 + 180 * b.attempts / most for b in found.bins],
        color="tab:blue",
        label="bins; area by attempts",
    )
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted chance that an attempt succeeds", ylabel="share solved")
    axes.set_title(f"{name}: calibration error {found.error:.3f} over {found.groups:,} groups", fontsize=10)
    axes.legend(loc="upper left", fontsize=8)
    data = io.BytesIO()
    FigureCanvasAgg(figure).print_png(data)
    return data.getvalue()
