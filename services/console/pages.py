"""Requests to pages. Handlers gather values; templates lay them out, escaped."""

from __future__ import annotations

import asyncio
import importlib.resources
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import jinja2
from aiohttp import web
from markupsafe import Markup

from services.console import transcript
from services.console.board import Board, RunBoard
from services.console.charts import Series, line_chart
from services.console.config import ConsoleSettings
from services.console.library import Library
from services.console.neighbours import survey
from services.console.visible import visible
from shared.contracts.messages import RolloutScored
from shared.contracts.run import Purpose
from shared.contracts.trajectory import Trajectory
from shared.objects import ObjectDamaged, ObjectMissing

PER_PAGE = 50
TOKENS_PER_PAGE = 1500
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
STATIC = {"console.css": "text/css", "console.js": "text/javascript"}

# Figures of a step by the names that the trainer gives them; those not named here follow in alphabetical order.
FIRST_METRICS = ("entropy", "mismatch_k3", "importance_clipped_share", "tokens_sampled", "grad_norm", "loss")
SECONDS = "seconds_"  # those share a chart
_OF_ONE_VERSION = re.compile(r"_version_\d+$")  # one figure per version and step: too many for curves

_BOARD = web.AppKey("board", Board)
_LIBRARY = web.AppKey("library", Library)
_SETTINGS = web.AppKey("settings", ConsoleSettings)
_TEMPLATES = web.AppKey("templates", jinja2.Environment)
_SESSION = web.AppKey("session", aiohttp.ClientSession)


def templates() -> jinja2.Environment:
    """Autoescape for everything, and control characters made visible in every value that is text."""

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) or not isinstance(value, str) else visible(value)

    return jinja2.Environment(
        loader=jinja2.PackageLoader("services.console"),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def build_app(settings: ConsoleSettings, board: Board, library: Library) -> web.Application:
    app = web.Application(middlewares=[_guard])
    app[_BOARD], app[_LIBRARY], app[_SETTINGS], app[_TEMPLATES] = board, library, settings, templates()
    app.cleanup_ctx.append(_session)
    app.add_routes(
        [
            web.get("/", overview),
            web.get("/runs/{run}", run_page),
            web.get("/runs/{run}/attempts", attempts_page),
            web.get("/runs/{run}/attempts/{attempt}", attempt_page),
            web.get("/alerts", alerts_page),
            web.get("/static/{name}", static),
        ]
    )
    return app


async def _session(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession() as session:
        app[_SESSION] = session
        yield


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answers to known host names only, and puts the security headers on everything, errors too."""
    settings = request.app[_SETTINGS]
    host = (request.url.host or "").lower()
    if host not in {"localhost", "127.0.0.1", "::1", settings.host, settings.reachable, *settings.console_names}:
        text = f"This console does not answer as {host!r}. Ask for localhost, or set ETUDE_CONSOLE_NAMES."
        return web.Response(status=421, text=visible(text) + "\n", headers=HEADERS)
    try:
        response = await handler(request)
    except web.HTTPNotFound as missing:
        response = _page(request, "missing.html", status=404, what=missing.reason)
    response.headers.update(HEADERS)
    return response


def _page(request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
    runs = sorted(request.app[_BOARD].runs, reverse=True)
    text = request.app[_TEMPLATES].get_template(template).render(runs=runs, path=request.path, **values)
    # A lone surrogate cannot be encoded; `visible` has named those of values, so nothing is lost here.
    return web.Response(text=text, content_type="text/html", status=status)


def _run(request: web.Request) -> RunBoard:
    run = request.app[_BOARD].runs.get(request.match_info["run"])
    if run is None:
        raise web.HTTPNotFound(reason="No message speaks of this run.")
    return run


async def static(request: web.Request) -> web.Response:
    kind = STATIC.get(request.match_info["name"])
    if kind is None:
        raise web.HTTPNotFound(reason="There is no such file.")
    text = importlib.resources.files("services.console").joinpath("static", request.match_info["name"]).read_text()
    return web.Response(text=text, content_type=kind)


async def overview(request: web.Request) -> web.Response:
    board = request.app[_BOARD]
    services = await survey(request.app[_SESSION], request.app[_SETTINGS].state)
    return _page(
        request,
        "overview.html",
        services=services,
        boards=[board.runs[run] for run in sorted(board.runs, reverse=True)],
        replicas=sorted(board.replicas.values(), key=lambda r: (r.pool, r.replica)),
        alerts=list(board.alerts)[:8],
    )


async def run_page(request: web.Request) -> web.Response:
    run = _run(request)
    try:
        config = await asyncio.to_thread(request.app[_LIBRARY].config, run.run)
    except (ObjectMissing, ObjectDamaged, ValueError):
        config = None
    board = request.app[_BOARD]
    return _page(
        request,
        "run.html",
        run=run,
        config=config,
        lately=run.lately(),
        charts=charts(run),
        replicas=[r for r in sorted(board.replicas.values(), key=lambda r: r.replica) if r.run == run.run],
        alerts=[a for a in board.alerts if a.run == run.run][:8],
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


async def attempts_page(request: web.Request) -> web.Response:
    """Newest first. `?outcome=solved|unsolved`, `?purpose=train|evaluate`, `?problem=ID`, `?page=N`."""
    run = _run(request)
    query = {name: request.query.get(name, "") for name in ("outcome", "purpose", "problem")}

    def wanted(scored: RolloutScored) -> bool:
        return (
            (query["outcome"] not in ("solved", "unsolved") or scored.verdict.solved == (query["outcome"] == "solved"))
            and (query["purpose"] not in list(Purpose) or scored.key.purpose == query["purpose"])
            and (not query["problem"] or scored.key.problem == query["problem"])
        )

    found = [scored for scored in reversed(run.attempts.values()) if wanted(scored)]
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(_number(request.query.get("page", "1"), 1), pages)
    return _page(
        request,
        "attempts.html",
        run=run,
        found=len(found),
        attempts=found[(page - 1) * PER_PAGE : page * PER_PAGE],
        query=query,
        page=page,
        pages=pages,
    )


async def attempt_page(request: web.Request) -> web.Response:
    """One trajectory. `?segment=N&token=M` chooses the part that is shown token by token."""
    run, attempt, library = _run(request), request.match_info["attempt"], request.app[_LIBRARY]
    scored = run.attempts.get(attempt)
    troubles: list[str] = []

    async def attempted(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """None, and a sentence for the page, where something cannot be had."""
        try:
            return await asyncio.to_thread(function, *arguments)
        except (ObjectMissing, ObjectDamaged, ValueError, OSError) as error:
            troubles.append(f"{what}: {type(error).__name__}: {error}")
            return None

    ref = scored.trajectory if scored else await attempted("trajectory", library.find_trajectory, run.run, attempt)
    if ref is None and not troubles:
        raise web.HTTPNotFound(reason="No attempt of this name has been scored or stored.")
    trajectory: Trajectory | None = await attempted("trajectory", library.trajectory, ref) if ref else None
    chat = await attempted("chat format", library.chat, run.run)
    config = await attempted("configuration", library.config, run.run)
    problem = None
    if config and trajectory:
        evaluating = trajectory.key.purpose == Purpose.evaluate and config.eval_pack
        pack = config.eval_pack if evaluating else config.pack
        problem = await attempted("problem", library.problem, pack, trajectory.key.problem)
    segments = trajectory.segments if trajectory else []
    chosen = min(_number(request.query.get("segment", "0"), 0), max(0, len(segments) - 1))
    first = _number(request.query.get("token", "0"), 0)

    def render() -> web.Response:
        """In a thread: a long trajectory takes a while."""
        return _page(
            request,
            "attempt.html",
            run=run,
            attempt=attempt,
            scored=scored,
            trajectory=trajectory,
            problem=problem,
            troubles=troubles,
            conversation=[list(transcript.blocks(segment, chat)) for segment in segments],
            versions=[transcript.versions(segment) for segment in segments],
            chosen=chosen,
            first=first,
            per_page=TOKENS_PER_PAGE,
            tokens=transcript.tokens(segments[chosen], chat, first, TOKENS_PER_PAGE) if segments else [],
            length=len(segments[chosen].tokens) if segments else 0,
            difference=transcript.diff(problem.files, trajectory.files) if problem and trajectory else [],
        )

    return await asyncio.to_thread(render)


async def alerts_page(request: web.Request) -> web.Response:
    return _page(request, "alerts.html", alerts=list(request.app[_BOARD].alerts))


def _number(text: str, least: int) -> int:
    """A number from a query, `least` where it is none."""
    return max(least, int(text)) if text.isascii() and text.isdigit() and len(text) < 9 else least
