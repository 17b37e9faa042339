"""All runs, the services beside this one, replicas and alerts."""

from __future__ import annotations

from aiohttp import web

from services.console.neighbours import survey
from services.console.site import BOARD, HTTP, SETTINGS, number, page

RUNS_PER_PAGE = 50


async def overview(request: web.Request) -> web.Response:
    """`?page=N`: older runs."""
    board = request.app[BOARD]
    services = await survey(request.app[HTTP], request.app[SETTINGS].state)
    names = board.newest()
    pages = max(1, -(-len(names) // RUNS_PER_PAGE))
    shown = min(number(request.query.get("page", "1"), 1), pages)
    return page(
        request,
        "overview.html",
        services=services,
        boards=[board.runs[run] for run in names[(shown - 1) * RUNS_PER_PAGE : shown * RUNS_PER_PAGE]],
        shown=shown,
        pages=pages,
        replicas=sorted(board.replicas.values(), key=lambda r: (r.pool, r.replica)),
        alerts=list(board.alerts)[:8],
    )


async def alerts_page(request: web.Request) -> web.Response:
    return page(request, "alerts.html", alerts=list(request.app[BOARD].alerts))
