"""Which curves a run has, and how several runs share one pair of axes. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from services.console.board import RunBoard
from services.console.charts import Series, line_chart

# Figures of a step by the names that the trainer gives them; those not named here follow in alphabetical order.
FIRST_METRICS = ("entropy", "mismatch_k3", "importance_clipped_share", "tokens_sampled", "grad_norm", "loss")
GAIN = "solved_gain"
SECONDS = "seconds_"  # those share a chart
MOST_SERIES = 4  # colours
HEADLINES = 6  # of `curves`: what one looks at; the others say why
_SHOWN_ELSEWHERE = {"age_max", GAIN}  # as curves of their own
_OF_ONE_VERSION = re.compile(r"_version_\d+$")  # one figure per version and step: too many for curves


@dataclass(frozen=True, slots=True)
class Curve:
    """`told`: what it says, in words. `percent`: the values are shares."""

    title: str
    told: str
    series: tuple[Series, ...]
    x_name: str
    percent: bool = False


def curves(run: RunBoard) -> list[Curve]:
    """Every curve of a run, in the order in which people look at them."""
    by_version = sorted(run.tallies.items())
    steps = sorted(run.steps.items())

    def per_version(title: str, told: str, value: Callable[[Any], float], *, percent: bool = False) -> Curve:
        points = [(version, value(tally)) for version, tally in by_version]
        return Curve(title, told, (Series(title.lower(), points),), "version", percent)

    found = [
        per_version(
            "Reward",
            "mean of training attempts, by the oldest version that sampled them",
            lambda tally: tally.reward / tally.attempts,
        ),
        per_version(
            "Pass rate",
            "share of training attempts that pass every test",
            lambda tally: tally.solved / tally.attempts,
            percent=True,
        ),
        per_version("Tokens", "sampled per attempt", lambda tally: tally.sampled_tokens / tally.attempts),
        per_version(
            "Broken calls",
            "share of tool calls that could not be read",
            lambda tally: tally.broken_tool_calls / max(1, tally.tool_calls),
            percent=True,
        ),
    ]
    gains = [(number, step.metrics[GAIN]) for number, step in steps if GAIN in step.metrics]
    if gains:
        told = "solved beyond what the policy of the run's first groups would solve of the same problems, by estimate"
        found.insert(2, Curve("Gain at equal difficulty", told, (Series("gain", gains),), "step", percent=True))
    ages = [(number, step.age) for number, step in steps]
    found.append(Curve("Age", "greatest age of a trained sample, in steps", (Series("age", ages),), "step"))
    names = {name for _, step in steps for name in step.metrics if not _OF_ONE_VERSION.search(name)} - _SHOWN_ELSEWHERE

    def per_step(name: str, title: str) -> Series:
        return Series(title, [(number, step.metrics[name]) for number, step in steps if name in step.metrics])

    for name in sorted(names, key=lambda n: (FIRST_METRICS.index(n) if n in FIRST_METRICS else len(FIRST_METRICS), n)):
        if not name.startswith(SECONDS):
            title = name.removesuffix("_share").replace("_", " ").capitalize()
            found.append(Curve(title, "of each step", (per_step(name, name),), "step", name.endswith("_share")))
    spent = [per_step(name, name.removeprefix(SECONDS)) for name in sorted(names) if name.startswith(SECONDS)]
    if spent:
        spent.sort(key=lambda series: -sum(y for _, y in series.points))
        found.append(Curve("Seconds", "of each step, by what they went to", tuple(spent[:MOST_SERIES]), "step"))
    return found


def draw(curve: Curve) -> tuple[str, str, Markup]:
    """(title, what it says, drawing)."""
    label = f"{curve.title}: {curve.told}"
    return curve.title, curve.told, line_chart(curve.series, x_name=curve.x_name, label=label, percent=curve.percent)


def together(runs: Sequence[RunBoard]) -> Iterator[Curve]:
    """Each curve of any of the runs once, with one series per run, in the order of `runs`: a run that lacks it has an empty
    one, so that a run keeps its colour. What shares a chart within a run gets one of its own."""
    merged: dict[str, tuple[Curve, dict[str, Series]]] = {}
    for run in runs:
        for curve in curves(run):
            for series in curve.series:
                title = (
                    curve.title
                    if len(curve.series) == 1 and curve.title != "Seconds"
                    else f"{curve.title}, {series.name}"
                )
                _, by_run = merged.setdefault(title, (curve, {}))
                by_run[run.run] = series
    for title, (curve, by_run) in merged.items():
        points = [Series(run.run, by_run[run.run].points if run.run in by_run else ()) for run in runs]
        yield Curve(title, curve.told, tuple(points), curve.x_name, curve.percent)
