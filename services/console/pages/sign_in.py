"""Signing in with a token, and out. The session's cookie is HttpOnly and SameSite=Strict; the token itself is never kept."""

from __future__ import annotations

import time

import structlog
from aiohttp import web

from services.console.access import SESSION_S, local_path
from services.console.site import ACCESS, SETTINGS, cookie_name, form_of, holder_of, page, session_of

log = structlog.get_logger()


async def sign_in_form(request: web.Request) -> web.Response:
    """`?next=PATH`: where to go afterwards."""
    return _form(request, request.query.get("next", "/"))


def _form(request: web.Request, after: str, *, wrong: bool = False) -> web.Response:
    settings = request.app[SETTINGS]
    values = {"after": local_path(after), "wrong": wrong, "reading": settings.open_to_readers}
    return page(request, "sign_in.html", status=401 if wrong else 200, **values)


async def sign_in(request: web.Request) -> web.Response:
    form = await form_of(request)
    token, after = str(form.get("token", "")).strip(), str(form.get("next", "/"))
    person = holder_of(request, token)
    if person is None:
        log.warning("sign_in_failed", address=request.remote)
        return _form(request, after, wrong=True)
    access, now = request.app[ACCESS], time.monotonic()
    if before := request.cookies.get(cookie_name(request)):
        access.sessions.end(before)
    response = web.HTTPSeeOther(local_path(after))
    response.set_cookie(
        cookie_name(request),
        access.sessions.begin(person, now),
        max_age=int(SESSION_S),
        httponly=True,
        samesite="Strict",
        secure=request.secure,
        path="/",
    )
    log.info("signed_in", who=person.name, role=person.role.value, address=request.remote)
    raise response


async def sign_out(request: web.Request) -> web.Response:
    form = await form_of(request)
    session = session_of(request)
    if session is not None and form.get("form_key") == session.form_key:
        request.app[ACCESS].sessions.end(request.cookies[cookie_name(request)])
        log.info("signed_out", who=session.person.name, address=request.remote)
    response = web.HTTPSeeOther("/")
    response.del_cookie(cookie_name(request), path="/")
    raise response
