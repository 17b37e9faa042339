"""Two to four runs side by side."""

from __future__ import annotations

import asyncio

from aiohttp import web

from services.console.comparison import MOST, differing, outcomes
from services.console.curves import draw, together
from services.console.library import Library
from services.console.site import BOARD, LIBRARY, page
from shared.contracts.run import RunConfig
from shared.objects import ObjectDamaged, ObjectMissing

OFFERED = 50  # newest runs to choose from


async def compare_page(request: web.Request) -> web.Response:
    """`?run=A&run=B…`; fewer than two: a form to choose them."""
    board, library = request.app[BOARD], request.app[LIBRARY]
    asked = list(dict.fromkeys(request.query.getall("run", [])))
    runs = [board.runs[name] for name in asked if name in board.runs][:MOST]
    troubles = [f"No message speaks of {name}." for name in asked[:MOST] if name not in board.runs]
    if len(asked) > MOST:
        troubles.append(f"{len(asked)} runs were chosen; {MOST} at most are compared.")
    if len(asked) == 1:
        troubles.append("One run alone is on its own page; choose another one beside it.")
    configs = await asyncio.gather(*[asyncio.to_thread(_config, library, run.run) for run in runs])
    troubles += [
        f"The configuration of {r.run} cannot be read." for r, c in zip(runs, configs, strict=True) if c is None
    ]
    enough = len(runs) > 1
    return page(
        request,
        "compare.html",
        offered=board.newest(OFFERED),
        chosen=[run.run for run in runs],
        troubles=troubles,
        charts=[draw(curve) for curve in together(runs)] if enough else [],
        figures=outcomes(runs) if enough else [],
        differences=differing(configs) if enough else [],
        known=sum(config is not None for config in configs),
    )


def _config(library: Library, run: str) -> RunConfig | None:
    try:
        return library.config(run)
    except (ObjectMissing, ObjectDamaged, ValueError, OSError):
        return None
