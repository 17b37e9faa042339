"""Requests to pages. Handlers gather values; templates lay them out, escaped. `services.console.site` is what all share."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from services.console import openapi, site
from services.console.board import Board
from services.console.config import ConsoleSettings
from services.console.lag import Lags
from services.console.library import Library
from services.console.pages.actions import act
from services.console.pages.attempts import attempt_page, attempts_page
from services.console.pages.compare import compare_page
from services.console.pages.overview import alerts_page, overview
from services.console.pages.problems import problems_page
from services.console.pages.run import run_page
from services.console.pages.sign_in import sign_in, sign_in_form, sign_out
from services.console.pages.start import start
from services.console.watcher import Watcher

STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
FORM_BYTES = 64 * 1024


def build_app(settings: ConsoleSettings, board: Board, library: Library, access: site.Access) -> web.Application:
    app = web.Application(middlewares=[site.guard], client_max_size=FORM_BYTES)
    app[site.BOARD], app[site.LIBRARY], app[site.SETTINGS], app[site.ACCESS] = board, library, settings, access
    app[site.TEMPLATES] = site.templates()
    app[site.STARTS] = site.Starts()
    lags = Lags(lambda: access.bus)
    app[site.WATCHER] = Watcher(settings, lags)

    async def watching(_: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(lags.watch())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app.cleanup_ctx.extend((_http, watching))
    app.add_routes(
        [
            web.get("/", overview),
            web.get("/runs/{run}", run_page),
            web.post("/runs/{run}/{action:pause|resume|rollback|stop}", act),
            web.post("/runs/{run}/start", start),
            web.get("/runs/{run}/problems", problems_page),
            web.get("/runs/{run}/attempts", attempts_page),
            web.get("/runs/{run}/attempts/{attempt}", attempt_page),
            web.get("/compare", compare_page),
            web.get("/alerts", alerts_page),
            web.get("/sign-in", sign_in_form),
            web.post("/sign-in", sign_in),
            web.post("/sign-out", sign_out),
            web.get("/openapi.json", described),
            web.get("/static/{name}", static),
        ]
    )
    return app


async def _http(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession() as session:
        app[site.HTTP] = session
        yield
        await app[site.WATCHER].close()


async def described(_: web.Request) -> web.Response:
    return web.json_response(openapi.document())


async def static(request: web.Request) -> web.Response:
    kind = STATIC.get(request.match_info["name"])
    if kind is None:
        raise web.HTTPNotFound(reason="There is no such file.")
    text = importlib.resources.files("services.console").joinpath("static", request.match_info["name"]).read_text()
    return web.Response(text=text, content_type=kind)
