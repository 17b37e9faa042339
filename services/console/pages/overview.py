"""All runs, the services beside this one, replicas and alerts."""

from __future__ import annotations

import time

from aiohttp import web

from services.console.flow import flow
from services.console.picture import draw, pace, waiting
from services.console.rotation import standings
from services.console.site import BOARD, HTTP, WATCHER, number, page

RUNS_PER_PAGE = 50


async def overview(request: web.Request) -> web.Response:
    """`?page=N`: older runs."""
    board = request.app[BOARD]
    now, before = await request.app[WATCHER].look(request.app[HTTP])
    seen = flow(now, before)
    names = board.newest()
    pages = max(1, -(-len(names) // RUNS_PER_PAGE))
    shown = min(number(request.query.get("page", "1"), 1), pages)
    return page(
        request,
        "overview.html",
        services=now.neighbours,
        flow=seen,
        picture=draw(seen),
        waiting=waiting,
        pace=pace,
        boards=[board.runs[run] for run in names[(shown - 1) * RUNS_PER_PAGE : shown * RUNS_PER_PAGE]],
        shown=shown,
        pages=pages,
        replicas=standings(board, now.neighbours, time.time()),
        alerts=list(board.alerts)[:8],
    )


async def alerts_page(request: web.Request) -> web.Response:
    return page(request, "alerts.html", alerts=list(request.app[BOARD].alerts))
