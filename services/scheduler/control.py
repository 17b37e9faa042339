"""What people and `etude` say about a run, `runs.control`, applied to its working set: started, paused, configured anew, ended.

A word that does not fit the run's state changes nothing, and is answered with the state. A configuration that cannot be
scheduled is never taken over.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.scheduler.working_set import FORGOTTEN, WorkingSet
from shared.contracts import messages as m
from shared.contracts import reconfiguring, schedulable
from shared.contracts.run import Ref, RunConfig
from shared.ledger.transitions import RUN_MOVES, RunState
from shared.objects import ObjectDamaged, ObjectMissing

ReadConfig = Callable[[Ref], RunConfig]
UNREADABLE = (ObjectMissing, ObjectDamaged, ValueError, msgspec.MsgspecError)  # reading again cannot help


class Refused(ValueError):
    """This message can never be applied; the text says why."""


def control(ws: WorkingSet, message: m.RunControl, now: float, read_config: ReadConfig) -> None:
    head = ws.head
    if message.by == m.BY_SCHEDULER:  # of a release that did not number its words: it may be old, and readers obey it
        return _answer(ws, now)
    match message.action:
        case "start" if head.state is not RunState.announced:
            _answer(ws, now)
        case "start":
            if _configure(ws, message, now, read_config):
                ws.enter(RunState.running, now, message.reason[:2000], by=message.by[:200])
        case "reconfigure":
            if _configure(ws, message, now, read_config):
                _answer(ws, now, by=message.by[:200])
        case "pause":
            _enter(ws, RunState.paused, now, message)
        case "resume":
            if ws.config is None and not _configure(ws, message, now, read_config):
                return
            if message.config is not None and message.config != head.config:
                _configure(ws, message, now, read_config)
            if head.state in (RunState.stopping, RunState.finished):
                for group in ws.waiting.values():  # a trainer that stopped may have forgotten what waits for it
                    group.announced = FORGOTTEN
                    ws.touch(group)
            _enter(ws, RunState.running, now, message)
        case "stop":
            _enter(ws, RunState.stopping, now, message)
        case "rollback":  # the trainer's to obey; the fork that follows says what becomes of the groups
            ws.event(
                now, "run.rollback", str(message.serial), head.last_event, reason=message.reason[:2000], by=message.by
            )
        case "finished":
            _answer(ws, now)  # nobody's word but ours


def _enter(ws: WorkingSet, state: RunState, now: float, message: m.RunControl) -> None:
    if state in RUN_MOVES[ws.head.state]:
        ws.enter(state, now, message.reason[:2000], by=message.by[:200])
    if ws.head.state is state is RunState.paused:
        ws.head.drain = message.drain
    _answer(ws, now, by=message.by[:200])


def _answer(ws: WorkingSet, now: float, *, by: str = m.BY_SCHEDULER) -> None:
    """Says what became of a word: an old one of ours, said once more after this, is then known to be old, and who took a word
    that changes nothing for one that does hears better."""
    if ws.head.state is not RunState.announced:
        ws.say_state(now, by=by)


def _configure(ws: WorkingSet, message: m.RunControl, now: float, read_config: ReadConfig) -> bool:
    """Reads and checks the configuration. A run that cannot be scheduled ends with the reason instead of hanging; one that
    has a configuration goes on as it was."""
    if message.config is None:
        raise Refused(f"run {message.run!r}: {message.action} without a configuration")
    try:
        config = read_config(message.config)
    except UNREADABLE as error:
        objections = [f"{message.config.key}: no readable run configuration: {error}"]
    else:
        objections = schedulable.objections(config)
        if config.run != message.run:
            objections.append(
                f"run: found {config.run!r}; allowed: {message.run!r}, which {message.config.key} was sent for"
            )
        elif ws.config is not None and (why := reconfiguring.objection(ws.config, config)):
            objections.append(why)
    if objections:
        ws.alert(now, "configuration", "critical", f"{message.config.key} cannot be scheduled", objections)
        if ws.config is None:
            ws.enter(RunState.finished, now, "; ".join(objections)[:2000])
            ws.say_state(now)
        return False
    ws.config, ws.head.config, ws.head.pack_hash = config, message.config, config.pack.checksum
    ws.event(
        now,
        "run.configured",
        "",
        ws.head.last_event,
        config=message.config.key,
        checksum=message.config.checksum,
        reason=message.reason[:2000],
        by=message.by[:200],
    )
    return True
