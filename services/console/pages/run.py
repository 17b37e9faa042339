"""One run: its figures, curves, controls, evaluations."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from services.console import starting
from services.console.curves import HEADLINES, curves, draw
from services.console.rotation import standings
from services.console.site import BOARD, HTTP, LIBRARY, WATCHER, page, run_of
from shared.contracts.life import offered
from shared.objects import ObjectDamaged, ObjectMissing


async def run_page(request: web.Request) -> web.Response:
    run = run_of(request)
    try:
        config = await asyncio.to_thread(request.app[LIBRARY].config, run.run)
    except (ObjectMissing, ObjectDamaged, ValueError, OSError):
        config = None
    beside = request.app[WATCHER].glance(request.app[HTTP]).neighbours
    board, charts = request.app[BOARD], [draw(curve) for curve in curves(run)]
    return page(
        request,
        "run.html",
        run=run,
        config=config,
        lately=run.lately(),
        headlines=charts[:HEADLINES],
        details=charts[HEADLINES:],
        replicas=[s for s in standings(board, beside, time.time()) if s.replica.run == run.run],
        alerts=[a for a in board.alerts if a.run == run.run][:8],
        actions=offered(run.state),
        in_the_way=starting.in_the_way(board.runs.values()),
        evals=sorted(run.evals.values(), key=lambda e: e.serial),
    )
