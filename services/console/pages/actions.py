"""Pause, resume, stop, go back to a version: each is one message on `runs.control`, which the scheduler and everybody else follow.

The topic is the record of who did what when: it is kept for a year, and the run's page shows it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import structlog
from aiohttp import web

from services.console.board import RunBoard
from services.console.control import REASON_CHARS, Done, allowed
from services.console.site import ACCESS, form_of, require_operator, run_of
from shared.bus import BusUnavailable
from shared.contracts.messages import RunControl
from shared.contracts.topics import RUNS_CONTROL

PUBLISH_WITHIN_S = 10.0
SEEN_WITHIN_S = 2.0  # the page after the action shows it, unless the bus is slow

log = structlog.get_logger()


async def act(request: web.Request) -> web.Response:
    """POST /runs/RUN/pause|resume|rollback|stop with `reason`, and for a session `form_key`. `drain=off`: a pause that leaves
    what is complete untrained. `version`: which to go back to."""
    form = await form_of(request)
    person = require_operator(request, str(form.get("form_key", "")))
    run, action = run_of(request), request.match_info["action"]
    if action not in allowed(run.state):
        raise web.HTTPConflict(reason=f"{run.run} is {run.state.value}: {action} does not apply. Nothing was done.")
    drain = action != "pause" or _drain([str(value) for value in form.getall("drain", [])])
    serial, word = None, ""
    if action == "rollback":
        serial, word = _version(run, str(form.get("version", ""))), secrets.token_hex(8)
    message = RunControl(
        run=run.run,
        action=action,
        serial=serial,
        id=word,
        reason=reason_of(form),
        drain=drain,
        by=person.name,
    )
    await say(request, message)
    await heard(lambda: any(_same(done, message) for done in run.done[-3:]))
    raise web.HTTPSeeOther(f"/runs/{quote(run.run, safe='')}")


def reason_of(form: Mapping[str, Any]) -> str:
    """On one line, as long as a page shows."""
    return " ".join(str(form.get("reason", "")).split())[:REASON_CHARS]


async def say(request: web.Request, word: RunControl) -> None:
    """Publishes it, and leaves who said what from where in the log. Raises HTTPServiceUnavailable."""
    bus, told = (
        request.app[ACCESS].bus,
        {"run": word.run, "action": word.action, "by": word.by, "address": request.remote},
    )
    try:
        if bus is None:
            raise BusUnavailable("not connected yet")
        async with asyncio.timeout(PUBLISH_WITHIN_S):
            await bus.publish(RUNS_CONTROL, word.run, word)
    except (BusUnavailable, TimeoutError) as error:
        log.warning("action_unsure", **told, error=str(error))
        raise web.HTTPServiceUnavailable(
            reason=f"The bus does not answer. Whether {word.action} was said is not known; the run's page will show it if it was."
        ) from None
    log.info("action", **told, reason=word.reason)


def _drain(said: Sequence[str]) -> bool:
    """Who does not say drains. A cleared box sends nothing, so our form says `off` first and a ticked box `on` after it."""
    word = said[-1] if said else "on"
    if word not in ("on", "off"):
        raise web.HTTPConflict(reason=f"drain: found {word[:20]!r}; allowed: on, off. Nothing was done.")
    return word == "on"


def _version(run: RunBoard, text: str) -> int:
    serial = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else -1
    if run.versions.get(serial, 0) < 1:
        raise web.HTTPConflict(
            reason=f"Version {text[:20]!r} is none that a step of {run.run} has published. Nothing was done."
        )
    return serial


def _same(done: Done, word: RunControl) -> bool:
    return (done.by, done.reason) == (word.by, word.reason) and done.action.startswith(word.action)


async def heard(there: Callable[[], bool]) -> None:
    """Until the board has heard what we said, so that the page after it shows it; not for long."""
    until = time.monotonic() + SEEN_WITHIN_S
    while not there() and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
