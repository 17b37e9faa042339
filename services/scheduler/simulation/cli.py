"""`etude plan fleet`: the rules of pacing side by side on one simulated fleet, and how many slots it needs."""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from services.scheduler.simulation.durations import Durations
    from services.scheduler.simulation.fleet import Fleet, Rule
    from services.scheduler.simulation.measures import Measures

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
WARM_UP = 0.25  # of the steps
IDLE = 0.05  # of the trainer's time: what the recommended slots keep to
SPARE = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # times the slots that the mean rate asks for: tried in this order


@app.command("fleet")
def fleet(
    step_seconds: Annotated[float, typer.Option(help="Of the trainer's computing in one step.")] = 120.0,
    median_seconds: Annotated[float, typer.Option(help="Half of the attempts are shorter.")] = 120.0,
    spread: Annotated[
        float,
        typer.Option(help="Standard deviation of the logarithm of the seconds. 1: one in a thousand lasts 22 medians."),
    ] = 0.6,
    durations: Annotated[
        Path | None,
        typer.Option(
            help="Recorded attempts instead: CSV with the columns group and seconds.", dir_okay=False, exists=True
        ),
    ] = None,
    slots: Annotated[int, typer.Option(help="Attempts at a time, of all workers. 0: recommend a number.", min=0)] = 0,
    sessions: Annotated[int, typer.Option(help="Attempts at a time that one inference replica serves.", min=1)] = 64,
    groups_per_step: Annotated[int, typer.Option(min=1)] = 16,
    group_size: Annotated[int, typer.Option(help="Attempts per problem.", min=2)] = 8,
    max_staleness: Annotated[int, typer.Option(help="The bound on a sample's age, in steps.", min=0)] = 8,
    swap_seconds: Annotated[
        float, typer.Option(help="From a step's end until all engines serve its weights.", min=0)
    ] = 2.0,
    steps: Annotated[int, typer.Option(help="Simulated. The first quarter is not measured.", min=8)] = 120,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal attempts.")] = 0,
) -> None:
    """How many attempts to run at a time, and what the trainer then waits for.

    Simulates attempts of many lengths under the rule that paces a run, and under the rules of other systems. Nothing is
    started. Take the seconds of attempts and steps from a run that you made (`etude status`, the dashboards), or record them:
    columns group and seconds, one line for each attempt.

    \b
    etude plan fleet --median-seconds 600 --spread 1.2 --step-seconds 1800 --max-staleness 4
    etude plan fleet --durations attempts.csv --step-seconds 240 --slots 512
    """
    from rich.console import Console

    from services.scheduler.simulation.durations import HeavyTailed
    from services.scheduler.simulation.fleet import Fleet
    from services.scheduler.simulation.rules import ALTERNATIVES

    console = Console()
    try:
        drawn = read(durations) if durations else HeavyTailed(median_seconds, spread)
        shape = Fleet(slots or 1, groups_per_step, group_size, max_staleness, step_s=step_seconds, swap_s=swap_seconds)
        found = _describe(drawn, shape, console, seed)
        shape, ours = _slots(shape, drawn, slots or math.ceil(found), steps, seed, given=bool(slots))
        rows = [ours, *(run(rule, shape, drawn, steps, seed) for rule in ALTERNATIVES)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _table(rows, console)
    replicas = math.ceil(shape.slots / sessions)
    console.print(f"\n{shape.slots} slots, {replicas} inference replicas of {sessions} attempts each", highlight=False)
    if ours.trainer_idle > IDLE:
        console.print(
            f"The trainer waits {ours.trainer_idle:.0%} of its time. Attempts outlast {max_staleness} steps of "
            f"{step_seconds:g} s, or come close to it: allow a greater age (--max-staleness), make steps longer "
            "(--groups-per-step), or end long attempts earlier.",
            highlight=False,
        )


def read(path: Path) -> Durations:
    """Raises ValueError that names the file, the line and what is allowed."""
    from services.scheduler.simulation.durations import Recorded

    groups: dict[str, list[float]] = {}
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if not {"group", "seconds"} <= set(rows.fieldnames or ()):
            raise ValueError(f"{path}: found the columns {rows.fieldnames or 'none'}; allowed: with group and seconds")
        for row in rows:
            try:
                groups.setdefault(row["group"], []).append(float(row["seconds"]))
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {rows.line_num}: found seconds {row['seconds']!r}; allowed: a number"
                ) from None
    return Recorded(list(groups.values()))


def run(rule: Callable[[], Rule], shape: Fleet, drawn: Durations, steps: int, seed: int) -> Measures:
    """Simulate one rule, with a progress bar."""
    from rich.progress import Progress

    from services.scheduler.simulation.fleet import simulate
    from services.scheduler.simulation.measures import measure

    one = rule()
    with Progress(transient=True, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task(one.name, total=steps)
        history = simulate(one, shape, drawn, steps=steps, seed=seed, after_step=lambda: progress.advance(task))
    return measure(one.name, shape, history, warm_up=max(1, int(steps * WARM_UP)))


def _slots(shape: Fleet, drawn: Durations, slots: int, steps: int, seed: int, *, given: bool) -> tuple[Fleet, Measures]:
    """The given slots; else the fewest of those tried with which the trainer waits no longer than it must."""
    from dataclasses import replace

    from services.scheduler.simulation.rules import Paced

    tried: list[tuple[Fleet, Measures]] = []
    for spare in (1.0,) if given else SPARE:
        one = replace(shape, slots=math.ceil(slots * spare))
        tried.append((one, run(Paced, one, drawn, steps, seed)))
        if tried[-1][1].trainer_idle <= IDLE:
            return tried[-1]
    least = min(ours.trainer_idle for _, ours in tried)
    return next(pair for pair in tried if pair[1].trainer_idle <= least + 0.01)


def _describe(drawn: Durations, shape: Fleet, console: object, seed: int) -> float:
    """Print what the attempts are like. Returns how many slots their mean asks for."""
    import numpy as np
    from rich.console import Console

    assert isinstance(console, Console)
    sample = drawn.groups(2000, shape.group_size, np.random.default_rng(seed))
    half, most, longest = np.quantile(sample, [0.5, 0.99, 0.999])
    console.print(
        f"attempts: half end within {half:,.0f} s, 99 % within {most:,.0f} s, 999 of 1,000 within {longest:,.0f} s; "
        f"the bound allows {shape.max_staleness * shape.step_s:,.0f} s ({shape.max_staleness} steps)",
        highlight=False,
    )
    return float(sample.mean()) * shape.groups_per_step * shape.group_size / shape.step_s


def _table(rows: list[Measures], console: object) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(box=None, header_style="bold")
    table.add_column("rule", no_wrap=True)
    for name in ("trainer idle", "slots idle", "groups/h", "thrown away", "mean age", "oldest", "bias by length"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.rule,
            f"{row.trainer_idle:.1%}",
            f"{row.slots_idle:.1%}",
            f"{row.groups_per_hour:,.0f}",
            f"{row.discarded:.1%}",
            f"{row.age_mean:.1f}",
            str(row.age_max),
            f"{row.bias:+.1%}",
        )
    console.print(table)
