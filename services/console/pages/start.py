"""A new run from the configuration that another one was started with: its configuration is stored, then one command is given."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from aiohttp import web

from services.console import starting
from services.console.pages import actions
from services.console.site import BOARD, LIBRARY, STARTS, form_of, require_operator, run_of
from shared.contracts.ids import new_run_id
from shared.contracts.messages import RunCommand
from shared.objects import ObjectDamaged, ObjectMissing


async def start(request: web.Request) -> web.Response:
    """POST /runs/RUN/start with `reason`, and for a session `form_key`. `seed`, `max_steps`, `minutes`: where they shall differ
    from RUN's."""
    form = await form_of(request)
    person = require_operator(request, str(form.get("form_key", "")))
    old, board, library, starts = run_of(request), request.app[BOARD], request.app[LIBRARY], request.app[STARTS]
    async with starts.lock:  # whoever clicks twice starts one
        if why := starts.unheard(board) or starting.in_the_way(board.runs.values()):
            raise web.HTTPConflict(reason=f"{why}. Nothing was done.")
        changes = {name: str(form.get(name, "")) for name in starting.MOST}
        run = new_run_id()
        try:
            config = starting.like(await asyncio.to_thread(library.config, old.run), run, changes)
            if lacking := await asyncio.to_thread(library.lacking, starting.refs(config)):
                raise web.HTTPConflict(reason=f"{lacking}: what {old.run} was made of is gone. Nothing was done.")
            ref = await asyncio.to_thread(library.keep_config, config)
        except starting.Unfit as error:
            raise web.HTTPConflict(reason=f"{error}. Nothing was done.") from None
        except (ObjectMissing, ObjectDamaged, ValueError) as error:
            told = f"The configuration of {old.run} cannot be read: {type(error).__name__}: {error}. Nothing was done."
            raise web.HTTPConflict(reason=told) from None
        except OSError as error:
            raise web.HTTPServiceUnavailable(reason=f"The object store: {error}. Nothing was done.") from None
        reason = " ".join([f"as {old.run} was", actions.reason_of(form)]).strip()
        command = RunCommand(run=run, action="start", config=ref, reason=reason, by=person.name)
        starts.note(run)
        await actions.say(request, command)
        await actions.heard(lambda: run in board.runs and board.runs[run].answered == command.id)
    raise web.HTTPSeeOther(f"/runs/{quote(run, safe='')}")
