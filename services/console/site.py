"""What all pages share: the security headers, who is asking, and how values become a page. Templates escape everything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import aiohttp
import jinja2
import structlog
from aiohttp import web
from markupsafe import Markup
from multidict import MultiDictProxy

from services.console.access import Failures, Person, Session, Sessions, Tokens
from services.console.board import Board, RunBoard
from services.console.config import ConsoleSettings
from services.console.excerpts import Masked
from services.console.library import Library
from services.console.watcher import Watcher
from shared.bus import Bus
from shared.foreign import foreign
from shared.masking import masked
from shared.visible import visible

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # Not no-referrer: browsers would send `Origin: null` with our own forms, and nobody could tell them from foreign ones.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOST_S = 60.0  # a bus that carries nothing for so long is said to be away elsewhere
ALWAYS_OPEN = ("/sign-in", "/static/", "/healthz", "/readyz", "/metrics")  # probes and Prometheus have no token


log = structlog.get_logger()


@dataclass(slots=True)
class Access:
    """Who may do what. `bus`: where actions go; None until it is connected."""

    tokens: Tokens
    sessions: Sessions = field(default_factory=Sessions)
    failures: Failures = field(default_factory=Failures)
    bus: Bus | None = None


@dataclass(slots=True)
class Starts:
    """One run is started at a time. `said`: the last that this console has started, `at`: when, by the monotonic clock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    said: str = ""
    at: float = 0.0

    def note(self, run: str) -> None:
        self.said, self.at = run, time.monotonic()

    def unheard(self, board: Board) -> str:
        """Why nobody can know yet whether a run goes on; empty: one can. A word that is not heard so long was never said."""
        if not board.complete:
            return "what was said before has not all been read yet; try again in a moment"
        heard = not self.said or self.said in board.runs or time.monotonic() - self.at > LOST_S
        return "" if heard else f"{self.said} was said to start, and the bus has not carried it yet"


BOARD = web.AppKey("board", Board)
LIBRARY = web.AppKey("library", Library)
SETTINGS = web.AppKey("settings", ConsoleSettings)
TEMPLATES = web.AppKey("templates", jinja2.Environment)
HTTP = web.AppKey("http", aiohttp.ClientSession)
ACCESS = web.AppKey("access", Access)
WATCHER = web.AppKey("watcher", Watcher)
STARTS = web.AppKey("starts", Starts)

_SESSION = web.RequestKey("session", Session)  # that the cookie names
_BEARER = web.RequestKey("bearer", Person)  # whose token the Authorization header holds


def templates() -> jinja2.Environment:
    """Autoescape for everything; in every value that is text, secrets masked and control characters made visible."""

    def finalize(value: Any) -> Any:
        if isinstance(value, Markup) or not isinstance(value, str):
            return value
        return visible(value if isinstance(value, Masked) else masked(value))

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("services.console"),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["utc"] = utc
    return environment


def utc(at: float) -> str:
    """Unix seconds for people; what no clock says (a hostile header) is said to be unknown."""
    try:
        return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return "unknown"


# Who is asking


def cookie_name(request: web.Request) -> str:
    """Cookies do not know ports: two consoles on one machine must not sign each other's people out."""
    return f"etude_{request.url.port}"


def session_of(request: web.Request) -> Session | None:
    return request.get(_SESSION)


def person_of(request: web.Request) -> Person | None:
    session = session_of(request)
    return session.person if session else request.get(_BEARER)


def require_operator(request: web.Request, form_key: str) -> Person:
    """Who may act, or the HTTP error that says why not. A cookie alone is not enough: the form must have been ours."""
    person = person_of(request)
    if person is None:
        raise web.HTTPUnauthorized(reason="Acting on a run needs a token. Sign in first.")
    if not person.may_act:
        raise web.HTTPForbidden(reason=f"{person.name} may read only; acting on a run needs an operator's token.")
    session = session_of(request)
    if session is not None and form_key != session.form_key:
        raise web.HTTPForbidden(
            reason="This form is of an earlier session. Go back, load the page anew, and try again."
        )
    return person


async def form_of(request: web.Request) -> MultiDictProxy[Any]:
    """What our own forms and `curl -d` send. Raises the HTTP error of what is no such form, before anything of it is stored."""
    if request.content_type.startswith("multipart/"):
        raise web.HTTPUnsupportedMediaType(reason="Allowed: application/x-www-form-urlencoded, as curl -d sends it.")
    try:
        return await request.post()
    except (ValueError, LookupError) as error:  # a character set that is none, or bytes that are none of it
        raise web.HTTPBadRequest(reason="This form cannot be read.") from error


def refuse_foreign_form(request: web.Request) -> None:
    """A request that changes something must come from our own pages, or from no browser at all."""
    if foreign(request.headers, request.host):
        raise web.HTTPForbidden(reason="This form was sent from another site. Nothing was done.")


@web.middleware
async def guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answers to known host names only, lets in who may read, and puts the security headers on everything, errors too."""
    settings = request.app[SETTINGS]
    try:
        host = (request.url.host or "").lower()
    except ValueError:  # no name at all, or a port that is none
        host = request.host
    if host not in {"localhost", "127.0.0.1", "::1", settings.host, settings.reachable, *settings.console_names}:
        text = f"This console does not answer as {host!r}. Ask for localhost, or set ETUDE_CONSOLE_NAMES."
        return web.Response(status=421, text=visible(text) + "\n", headers=HEADERS)
    try:
        _recognise(request)
        if request.method not in ("GET", "HEAD"):
            refuse_foreign_form(request)
        open_path = settings.open_to_readers or request.path.startswith(ALWAYS_OPEN)
        if not open_path and person_of(request) is None:
            if request.method != "GET":
                raise web.HTTPUnauthorized(reason="This console needs a token. Sign in first.")
            raise web.HTTPSeeOther(f"/sign-in?next={quote(request.path_qs, safe='')}")
        response = await handler(request)
    except web.HTTPNotFound as missing:
        response = page(request, "said.html", status=404, title="Not found", what=missing.reason)
    except (web.HTTPUnauthorized, web.HTTPForbidden, web.HTTPConflict, web.HTTPServiceUnavailable) as refused:
        _note_refusal(request, refused)
        title = {401: "Sign in first", 403: "Not allowed", 409: "Not done", 503: "Not done"}[refused.status]
        response = page(request, "said.html", status=refused.status, title=title, what=refused.reason)
        if refused.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
    except web.HTTPException as other:
        _note_refusal(request, other)
        other.headers.update(HEADERS)
        raise
    response.headers.update(HEADERS)
    return response


def _note_refusal(request: web.Request, refused: web.HTTPException) -> None:
    """Who wanted to do what, from where, and why it was not done."""
    if request.method in ("GET", "HEAD") or refused.status < 400:
        return
    person = person_of(request)
    log.warning(
        "refused",
        path=request.rel_url.raw_path,
        by=person.name if person else "",
        address=request.remote,
        status=refused.status,
        reason=refused.reason,
    )


def _recognise(request: web.Request) -> None:
    """Notes whose session or token the request carries. Wrong tokens are counted, and soon refused unheard."""
    access, now = request.app[ACCESS], time.monotonic()
    cookie = request.cookies.get(cookie_name(request))
    if cookie and (session := access.sessions.find(cookie, now)):
        request[_SESSION] = session
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    if kind.lower() == "bearer":
        person = holder_of(request, token.strip())
        if person is None:
            raise web.HTTPUnauthorized(reason="Nobody has this token.")
        request[_BEARER] = person


def holder_of(request: web.Request, token: str) -> Person | None:
    """Whose token this is; None: nobody's, which counts as a failure. Raises HTTPTooManyRequests for a wrong one alone: behind
    an ingress all have one address, and a script with an old token must not keep people from stopping a run."""
    access, now, address = request.app[ACCESS], time.monotonic(), request.remote or ""
    if (person := access.tokens.holder(token)) is not None:
        return person
    if wait := access.failures.wait(address, now):
        raise web.HTTPTooManyRequests(
            text=f"Too many wrong tokens. Try again in {wait:.0f} s.\n", headers={"Retry-After": f"{wait + 1:.0f}"}
        )
    access.failures.note(address, now)
    return None


# Pages


def page(request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
    session, reads = session_of(request), request.app[SETTINGS].open_to_readers or person_of(request) is not None
    text = (
        request.app[TEMPLATES]
        .get_template(template)
        .render(
            runs=request.app[BOARD].newest(3) if reads else [],
            path=request.path,
            person=person_of(request),
            form_key=session.form_key if session else "",
            **values,
        )
    )
    # A lone surrogate cannot be encoded; `visible` has named those of values, so nothing is lost here.
    return web.Response(text=text, content_type="text/html", status=status)


def run_of(request: web.Request) -> RunBoard:
    run = request.app[BOARD].runs.get(request.match_info["run"])
    if run is None:
        raise web.HTTPNotFound(reason="No message speaks of this run.")
    return run


def number(text: str, least: int) -> int:
    """A number from a query, `least` where it is none."""
    return max(least, int(text)) if text.isascii() and text.isdigit() and len(text) < 9 else least
