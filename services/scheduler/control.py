"""Commands to a run (`runs.commands`), applied to its working set: start it, pause it, change its configuration, end it.

A command that does not apply (`shared.contracts.life`) changes nothing. Each is answered with how the run stands. A configuration
that cannot be scheduled is never taken over.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from services.scheduler.working_set import FORGOTTEN, WorkingSet
from shared.contracts import messages as m
from shared.contracts import reconfiguring, schedulable
from shared.contracts.life import RunState, after
from shared.contracts.run import Ref, RunConfig
from shared.objects import ObjectDamaged, ObjectMissing

ReadConfig = Callable[[Ref], RunConfig]
UNREADABLE = (ObjectMissing, ObjectDamaged, ValueError, msgspec.MsgspecError)  # reading again cannot help


class Refused(ValueError):
    """This message can never be applied; the text says why."""


def control(ws: WorkingSet, command: m.RunCommand, now: float, read_config: ReadConfig) -> None:
    """Apply a command, and answer it. Raises Refused."""
    state = after(ws.head.state, command.action)
    if state is not None and _takes(ws, command, now, read_config):
        if state is RunState.running and ws.head.state in (RunState.stopping, RunState.finished):
            for group in ws.waiting.values():  # a trainer that stopped may have forgotten what waits for it
                group.announced = FORGOTTEN
                ws.touch(group)
        if state is not ws.head.state:
            ws.enter(state, now, command.reason[:2000], by=command.by[:200])
        if command.action == "pause":
            ws.head.drain = command.drain
    if ws.head.state is not RunState.announced:
        ws.say_state(now, answers=command.id[:200])


def _takes(ws: WorkingSet, command: m.RunCommand, now: float, read_config: ReadConfig) -> bool:
    """Take over what the command brings. Return whether it leads on: not without a configuration that can be scheduled."""
    match command.action:
        case "start" | "reconfigure":
            return _configure(ws, command, now, read_config)
        case "resume" if ws.config is None or command.config not in (None, ws.head.config):
            return _configure(ws, command, now, read_config) or ws.config is not None
        case "rollback":
            if command.serial is None or not command.id:
                raise Refused(f"run {command.run!r}: rollback without a serial or an id")
            ws.go_back(m.Rollback(command.serial, command.id[:200]), now, command)
    return True


def _configure(ws: WorkingSet, command: m.RunCommand, now: float, read_config: ReadConfig) -> bool:
    """Reads and checks the configuration. A run that cannot be scheduled ends with the reason instead of hanging; one that
    has a configuration goes on as it was."""
    if command.config is None:
        raise Refused(f"run {command.run!r}: {command.action} without a configuration")
    try:
        config = read_config(command.config)
    except UNREADABLE as error:
        objections = [f"{command.config.key}: no readable run configuration: {error}"]
    else:
        objections = schedulable.objections(config, ws.config)
        if config.run != command.run:
            objections.append(
                f"run: found {config.run!r}; allowed: {command.run!r}, which {command.config.key} was sent for"
            )
        elif ws.config is not None and (why := reconfiguring.objection(ws.config, config)):
            objections.append(why)
    if objections:
        ws.alert(now, "configuration", "critical", f"{command.config.key} cannot be scheduled", objections)
        if ws.config is None and ws.head.state is not RunState.finished:
            ws.enter(RunState.finished, now, "; ".join(objections)[:2000])
        return False
    ws.configure(config, command.config, now, command)
    return True
