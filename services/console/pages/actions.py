"""Pause, resume, stop, go back to a version: each is one command on `runs.commands`, which the scheduler applies and answers.

The topic is the record of who did what when: it is kept for a year, and the run's page shows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import structlog
from aiohttp import web

from services.console.board import RunBoard
from services.console.control import REASON_CHARS
from services.console.site import ACCESS, form_of, require_operator, run_of
from shared.bus import BusUnavailable
from shared.contracts.life import offered
from shared.contracts.messages import RunCommand
from shared.contracts.topics import RUNS_COMMANDS

PUBLISH_WITHIN_S = 10.0
SEEN_WITHIN_S = 2.0  # the page after the action shows it, unless the bus is slow

log = structlog.get_logger()


async def act(request: web.Request) -> web.Response:
    """POST /runs/RUN/pause|resume|rollback|stop with `reason`, and for a session `form_key`. `drain=off`: a pause that leaves
    what is complete untrained. `version`: which to go back to."""
    form = await form_of(request)
    person = require_operator(request, str(form.get("form_key", "")))
    run, action = run_of(request), request.match_info["action"]
    if action not in offered(run.state):
        raise web.HTTPConflict(reason=f"{run.run} is {run.state.value}: {action} does not apply. Nothing was done.")
    drain = action != "pause" or _drain([str(value) for value in form.getall("drain", [])])
    command = RunCommand(
        run=run.run,
        action=action,
        serial=_version(run, str(form.get("version", ""))) if action == "rollback" else None,
        reason=reason_of(form),
        drain=drain,
        by=person.name,
    )
    await say(request, command)
    await heard(lambda: run.answered == command.id)
    raise web.HTTPSeeOther(f"/runs/{quote(run.run, safe='')}")


def reason_of(form: Mapping[str, Any]) -> str:
    """On one line, as long as a page shows."""
    return " ".join(str(form.get("reason", "")).split())[:REASON_CHARS]


async def say(request: web.Request, command: RunCommand) -> None:
    """Publish a command, and log who gave it from where. Raises HTTPServiceUnavailable."""
    bus, told = (
        request.app[ACCESS].bus,
        {"run": command.run, "action": command.action, "by": command.by, "address": request.remote},
    )
    try:
        if bus is None:
            raise BusUnavailable("not connected yet")
        async with asyncio.timeout(PUBLISH_WITHIN_S):
            await bus.publish(RUNS_COMMANDS, command.run, command)
    except (BusUnavailable, TimeoutError) as error:
        log.warning("action_unsure", **told, error=str(error))
        raise web.HTTPServiceUnavailable(
            reason=f"The bus does not answer. Whether it got {command.action} is not known; the run's page shows it if it did."
        ) from None
    log.info("action", **told, reason=command.reason)


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


async def heard(there: Callable[[], bool]) -> None:
    """Until the scheduler has answered, so that the page after it shows what became of it; not for long."""
    until = time.monotonic() + SEEN_WITHIN_S
    while not there() and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
