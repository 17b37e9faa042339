"""Line charts as inline SVG, drawn on the server. Pure; colours come from the style sheet by class."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from shared.visible import visible

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 24
SMOOTH_FROM = 24  # points; a shorter curve is drawn as it is, a longer one as a moving mean over its faint self
POINTS = 120  # of all series; more are averaged into so many: nobody sees more on this width
LEAST_POINTS = 30  # of each series


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: (x, y), x rising. What is not finite is left out."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(series: Sequence[Series], *, x_name: str, label: str, percent: bool = False) -> Markup:
    """An SVG of the series; without a point, a short text instead. `percent`: y is a share, shown in per cent from 0."""
    most = max(LEAST_POINTS, POINTS // max(1, len(series)))
    drawn = [(s.name, _thin([p for p in s.points if all(map(math.isfinite, p))], most)) for s in series]
    everything = [p for _, points in drawn for p in points]
    if not everything:
        return Markup('<p class="quiet">nothing yet</p>')
    xs, ys = [p[0] for p in everything], [p[1] for p in everything]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    ticks = _ticks(min(0.0, *ys), max(0.01, *ys)) if percent else _ticks(min(ys), max(ys))
    y_low, y_high = ticks[0], ticks[-1]

    x_scale, y_scale = (WIDTH - LEFT - RIGHT) / (x_high - x_low), (HEIGHT - TOP - BOTTOM) / (y_high - y_low)

    def across(x: float) -> float:
        return LEFT + (x - x_low) * x_scale

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) * y_scale

    def path(kind: str, points: Sequence[tuple[float, float]]) -> str:
        return f'<polyline class="{kind}" points="{" ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in points)}"/>'

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(visible(label))}" class="chart">',
        *(_grid(down(tick), _number(tick, percent)) for tick in ticks),
    ]
    for tick in _whole(_ticks(x_low, x_high), x_low, x_high):
        parts.append(f'<text x="{across(tick):.1f}" y="{HEIGHT - 8}" class="tick" text-anchor="middle">{tick:g}</text>')
    along = escape(visible(x_name))
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" class="tick" text-anchor="end">{along}</text>')
    for i, (name, points) in enumerate(drawn):
        if len(points) >= SMOOTH_FROM:
            parts.append(path(f"raw s{i % 4}", points))
        parts.append(path(f"line s{i % 4}", _smooth(points)))
        told = escape(visible(name))
        parts.append(f'<g class="dots{" alone" if len(points) == 1 else ""} s{i % 4}">')  # one point makes no line
        parts += [
            f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.5">'
            f"<title>{told} {_number(y, percent)} at {along} {x:g}</title></circle>"
            for x, y in points
        ]
        parts.append("</g>")
    parts.append("</svg>")
    if len(drawn) > 1:
        names = "".join(
            f'<span class="key s{i % 4}">{escape(visible(name))}</span>' for i, (name, _) in enumerate(drawn)
        )
        parts.append(f'<p class="keys">{names}</p>')
    return Markup("".join(parts))


def _grid(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" class="tick" text-anchor="end">{escape(text)}</text>'
    )


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over the last tenth of the curve; a short curve as it is."""
    if len(points) < SMOOTH_FROM:
        return points
    window = max(3, len(points) // 10)
    ys = [y for _, y in points]
    return [(x, sum(part := ys[max(0, i + 1 - window) : i + 1]) / len(part)) for i, (x, _) in enumerate(points)]


def _thin(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points: means of neighbours."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(p[0] for p in g) / len(g), sum(p[1] for p in g) / len(g)) for g in groups]


def _ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers that enclose low..high."""
    if high - low < 1e-12 * max(1.0, abs(low)):
        low, high = low - max(abs(low), 1.0) * 0.5, high + max(abs(high), 1.0) * 0.5
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, max(last, first + 1) + 1)]


def _whole(ticks: list[float], low: float, high: float) -> list[float]:
    """Ticks of a counting axis, with room for its name at the end."""
    return [t for t in ticks if t == int(t) and low <= t <= low + (high - low) * 0.88]


def _number(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.3g} %"
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.2g}"
    return f"{value:.4g}"
