"""How runs stand, said in place of a scheduler."""

from __future__ import annotations

import time
from typing import Any

from shared.bus import Bus
from shared.contracts import topics as t
from shared.contracts.life import RunState, after
from shared.contracts.messages import Rollback, RunCommand, RunStatus
from shared.contracts.run import Ref
from shared.contracts.statuses import Statuses

_last = 0  # number
_started: dict[str, tuple[list[Ref], float]] = {}  # run -> its configurations, and when it was started


def status(run: str, state: str = "running", *configs: Ref, **more: Any) -> RunStatus:
    """A status that is newer than those made before. With configurations it is that of a run that is started now, without as
    those of the run before."""
    global _last
    now = time.time()
    number = _last = max(_last + 1, int(1000 * now))
    since = min(number / 1000, now)  # many made in one millisecond number ahead of the clock
    if configs:
        _started[run] = [*configs], since
    taken, started = _started.get(run, ([], 0.0))
    fields = {"number": number, "since": since, "started": started} | more
    return RunStatus(run=run, state=RunState(state), configs=taken, **fields)


def running(*runs: str) -> Statuses:
    """What a reader knows when these runs were started, in this order."""
    statuses = Statuses()
    for run in runs:
        statuses.hear(status(run, "running", Ref(key="k", size=1, checksum="0" * 32)))
    return statuses


async def rule(bus: Bus, *known: RunStatus) -> None:
    """Answer every command as the scheduler does, until cancelled. `known`: how runs stand at the beginning."""
    statuses = Statuses()
    for one in known:
        statuses.hear(one)
    async for delivery in bus.deliveries([t.RUNS_COMMANDS, t.RUNS_STATE], None, 8):
        message = delivery.message
        match message:
            case RunStatus():
                statuses.hear(message)
            case RunCommand():
                now, old = time.time(), statuses.of(message.run)
                before = RunState.announced if old is None else old.state
                state = after(before, message.action) or before
                moved = state is not before
                configs = [*(old.configs if old else []), *([message.config] if message.config else [])]
                rolled = None
                if message.action == "rollback" and message.serial is not None and after(before, "rollback"):
                    rolled = Rollback(message.serial, message.id)
                answer = RunStatus(
                    run=message.run,
                    state=state,
                    number=max(int(1000 * now), old.number + 1 if old else 0),
                    configs=configs,
                    started=old.started if old else now,
                    since=now if moved or old is None else old.since,
                    reason=message.reason if moved or old is None else old.reason,
                    by=message.by if moved or old is None else old.by,
                    beside=old.beside if old else message.beside,
                    rollback=rolled or (old.rollback if old else None),
                    drain=message.drain,
                    answers=message.id,
                )
                statuses.hear(answer)
                await bus.publish(t.RUNS_STATE, message.run, answer)
        delivery.done()
