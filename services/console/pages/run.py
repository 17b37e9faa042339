"""One run: its figures, curves, controls, evaluations."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from aiohttp import web
from markupsafe import Markup

from services.console.board import RunBoard
from services.console.charts import Series, line_chart
from services.console.control import allowed
from services.console.site import BOARD, LIBRARY, page, run_of
from shared.objects import ObjectDamaged, ObjectMissing

# Figures of a step by the names that the trainer gives them; those not named here follow in alphabetical order.
FIRST_METRICS = ("entropy", "mismatch_k3", "importance_clipped_share", "tokens_sampled", "grad_norm", "loss")
SECONDS = "seconds_"  # those share a chart
_OF_ONE_VERSION = re.compile(r"_version_\d+$")  # one figure per version and step: too many for curves


async def run_page(request: web.Request) -> web.Response:
    run = run_of(request)
    try:
        config = await asyncio.to_thread(request.app[LIBRARY].config, run.run)
    except (ObjectMissing, ObjectDamaged, ValueError):
        config = None
    board = request.app[BOARD]
    return page(
        request,
        "run.html",
        run=run,
        config=config,
        lately=run.lately(),
        charts=charts(run),
        replicas=[r for r in sorted(board.replicas.values(), key=lambda r: r.replica) if r.run == run.run],
        alerts=[a for a in board.alerts if a.run == run.run][:8],
        actions=allowed(run.state),
        evals=sorted(run.evals.values(), key=lambda e: e.serial),
    )


def charts(run: RunBoard) -> list[tuple[str, str, Markup]]:
    """(title, what it says, drawing) of every curve of a run."""
    by_version = sorted(run.tallies.items())
    steps = sorted(run.steps.items())

    def per_version(name: str, value: Callable[[Any], float]) -> Series:
        return Series(name, [(version, value(tally)) for version, tally in by_version])

    drawn = [
        (
            "Reward",
            "mean of training attempts, by the oldest version that sampled them",
            [per_version("reward", lambda tally: tally.reward / tally.attempts)],
            "version",
            False,
        ),
        (
            "Pass rate",
            "share of training attempts that pass every test",
            [per_version("pass rate", lambda tally: tally.solved / tally.attempts)],
            "version",
            True,
        ),
        (
            "Tokens",
            "sampled per attempt",
            [per_version("tokens", lambda tally: tally.sampled_tokens / tally.attempts)],
            "version",
            False,
        ),
        (
            "Broken calls",
            "share of tool calls that could not be read",
            [per_version("broken", lambda tally: tally.broken_tool_calls / max(1, tally.tool_calls))],
            "version",
            True,
        ),
        (
            "Age",
            "greatest age of a trained sample, in steps",
            [Series("age", [(step, max(commit.groups.values(), default=0)) for step, commit in steps])],
            "step",
            False,
        ),
    ]
    names = {name for _, commit in steps for name in commit.metrics if not _OF_ONE_VERSION.search(name)}

    def per_step(name: str, title: str) -> Series:
        return Series(title, [(step, commit.metrics[name]) for step, commit in steps if name in commit.metrics])

    for name in sorted(names, key=lambda n: (FIRST_METRICS.index(n) if n in FIRST_METRICS else len(FIRST_METRICS), n)):
        if not name.startswith(SECONDS):
            title = name.removesuffix("_share").replace("_", " ").capitalize()
            drawn.append((title, "of each step", [per_step(name, name)], "step", name.endswith("_share")))
    spent = [per_step(name, name.removeprefix(SECONDS)) for name in sorted(names) if name.startswith(SECONDS)]
    if spent:
        spent.sort(key=lambda series: -sum(y for _, y in series.points))
        drawn.append(("Seconds", "of each step, by what they went to", spent[:4], "step", False))
    return [
        (title, told, line_chart(series, x_name=x_name, label=f"{title}: {told}", percent=percent))
        for title, told, series, x_name, percent in drawn
    ]
