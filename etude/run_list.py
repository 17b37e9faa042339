"""What `etude runs` shows: every run that the bus knows, as a table or as rows of JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.standing import Standing, Standings
    from shared.settings import ServiceSettings

SPANS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
COLOURS = {"running": "green", "paused": "yellow", "stopping": "yellow"}


async def read(settings: ServiceSettings) -> Standings:
    from etude.hearing import past
    from etude.standing import HEARD, Standings

    found = Standings()
    await past(settings, HEARD, found.hear, client="etude-runs")
    return found


def _left(found: Standings, run: Standing) -> str:
    """For which run the trainer has left this one, although it is not finished."""
    return found.followed if run in found.unfinished and not run.beside and run.run != found.followed else ""


def rows(found: Standings) -> list[dict[str, Any]]:
    kept = ("run", "since", "started", "reason", "by", "serial", "step")
    return [
        {**{name: getattr(run, name) for name in kept}, "state": run.state.value, "left_for": _left(found, run)}
        for run in reversed(found.runs)
    ]


def show(found: Standings) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from shared.visible import visible

    now = time.time()
    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "for", "step", "version", "started"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("step", "version") else "left")
    table.add_column("why", overflow="fold")
    for run in reversed(found.runs):
        left = _left(found, run)
        why = "; ".join(filter(None, (run.why, left and f"its trainer left for {left}, which was started after it")))
        colour = COLOURS.get(run.state.value, "default")
        table.add_row(
            escape(visible(run.run)),
            f"[{colour}]{run.state.value}[/]",
            _span(now - run.since),
            str(run.step),
            str(run.serial) if run.serial >= 0 else "",
            f"{_span(now - run.started)} ago",
            escape(visible(why)),
        )
    Console().print(table)


def _span(seconds: float) -> str:
    unit, name = next(((unit, name) for unit, name in SPANS if seconds >= unit), (1, "s"))
    return f"{max(0, int(seconds // unit))} {name}"
