"""A person's word to a run, as the console says it (services/console/pages/actions.py), and the wait for what becomes of it.

Nothing is said that cannot be obeyed: a run that is not known or not in a fitting state, a version that was never published,
a run that the trainer has left, a folder in which nothing runs.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from pathlib import Path

from etude.hearing import embedded
from etude.standing import HEARD, Listener, Standing, Standings
from etude.supervisor import holder
from shared import bus as buses
from shared.bus import Bus, BusUnavailable
from shared.contracts.life import Action, RunState, after, offered
from shared.contracts.messages import Alert, PolicyPublished, RunCommand, RunStatus
from shared.contracts.topics import ALERTS, RUNS_COMMANDS
from shared.settings import ServiceSettings, Told

ANSWER_WITHIN_S = 30.0  # the scheduler answers within a second; it may just be starting
END_WITHIN_S = 180.0  # a trainer that is silent for 120 s has nothing in hand (services/scheduler/life.py)
BACK_WITHIN_S = 180.0  # the step in hand comes first
NAME_CHARS, REASON_CHARS, NAMED = 80, 500, 5

Say = Callable[[str], None]


class Refused(Told, ValueError):
    """What was found, and the way out."""


async def act(
    settings: ServiceSettings,
    action: Action,
    run: str,
    say: Say,
    *,
    reason: str = "",
    drain: bool = True,
    version: int | None = None,
) -> None:
    """Says the word and waits until it was obeyed, a while at most. `run`: empty where only one is not finished. Raises
    Refused, BusUnavailable."""
    require_listeners(settings)
    bus = buses.connect(settings.bus_url, client="etude-runs")
    try:
        async with Listener(bus, (*HEARD, ALERTS) if action == "rollback" else HEARD) as listener:
            standing = fitting(listener.standings, run, action, version)
            word = RunCommand(
                run=standing.run,
                action=action,
                serial=version,
                reason=shortened(reason),
                drain=drain,
                by=author(f"etude {action}"),
            )
            incarnation, wanted = standing.incarnation, after(standing.state, action)
            await tell(bus, word)
            if action == "rollback":
                await _gone_back(listener, word, standing, incarnation, settings, say)
                return
            await answered(listener, word, settings)
            if standing.state not in (wanted, RunState.finished if action == "stop" else wanted):
                raise too_late(word, standing)
            say(f"{word.run} {_outcome(word)}")
            if action == "stop":
                await _ended(listener, standing, say)
    finally:
        await bus.close()


async def tell(bus: Bus, word: RunCommand) -> None:
    """Raises Refused."""
    try:
        await bus.publish(RUNS_COMMANDS, word.run, word)
    except BusUnavailable as error:
        raise Refused(
            f"{error}. Whether {word.action} was said is not known; `etude runs` shows it if it was"
        ) from None


def shortened(reason: str) -> str:
    """On one line, as long as a page shows."""
    return " ".join(reason.split())[:REASON_CHARS]


def author(command: str) -> str:
    """Whose word it is: the user of this machine, and what they called. Never the scheduler's name alone."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        user = f"user {os.getuid()}"
    return f"{''.join(c for c in user if c.isprintable())[:NAME_CHARS]}, {command}"


def require_listeners(settings: ServiceSettings) -> None:
    """Raises Refused where nobody can hear what is said: the embedded bus is a file, and no supervisor holds its folder. Who
    listens to a cluster cannot be known from here."""
    if embedded(settings) is not None and holder(settings.state) is None:
        raise Refused(f"nothing runs in {settings.state}: `{in_folder('etude up --detach', settings)}` first")


def in_folder(command: str, settings: ServiceSettings) -> str:
    """The command, with --state where it would look elsewhere without."""
    elsewhere = settings.state != Path(os.environ.get("ETUDE_STATE") or ".etude")
    return f"{command} --state {settings.state}" if elsewhere else command


def chosen(standings: Standings, run: str) -> Standing:
    """Raises Refused."""
    if run:
        if (known := standings.of(run)) is not None:
            return known
        newest = ", ".join(one.run for one in standings.runs[: -NAMED - 1 : -1])
        raise Refused(f"run {run!r}: not known here; {f'the newest are {newest}' if newest else 'none was started'}")
    unfinished = standings.unfinished
    if len(unfinished) == 1:
        return unfinished[0]
    if not standings.runs:
        raise Refused("no run was started here: `etude start` begins one")
    if not unfinished:
        raise Refused("no run goes on here: `etude runs` lists those that have ended, `etude start` begins one")
    names = ", ".join(f"{one.run} ({one.state})" for one in unfinished)
    raise Refused(f"RUN: left out, and {len(unfinished)} runs are not finished; name one of {names}")


def fitting(standings: Standings, run: str, action: Action, version: int | None) -> Standing:
    """The run that is meant. Raises Refused, where the word would change nothing too."""
    standing = chosen(standings, run)
    if why := objection(standings, standing, action, version):
        raise Refused(why)
    return standing


def objection(standings: Standings, run: Standing, action: Action, version: int | None) -> str:
    """Why the word would change nothing, and the way out; empty: it fits."""
    if run.state is RunState.finished:
        return f"{run.run} is finished{f': {run.why}' if run.why else ''}. {anew(run.run)}"
    if action not in (fitting := offered(run.state)):
        return f"{run.run} is {run.state}: {action} does not apply; allowed: {', '.join(fitting) or 'nothing yet'}"
    if action in ("resume", "rollback") and not run.beside and run.run != standings.followed:
        return (
            f"{run.run} would get no trainer and no engine: both follow {standings.followed}, which was started after it, "
            f"also when that has ended. {anew(run.run)}"
        )
    if action == "rollback" and (version is None or run.versions.get(version, 0) < 1):
        there = sorted(serial for serial, step in run.versions.items() if step > 0)
        found = f"published: {there[0]} to {there[-1]}" if there else "none is published yet"
        return f"--to {version}: no version that a step of {run.run} has published; {found}"
    return ""


def anew(run: str) -> str:
    return (
        f"A new run goes on from its last version: `etude export {run} --out DIR`, `etude import DIR --name NAME`, "
        "`etude start --base NAME`"
    )


def unanswered(service: str, settings: ServiceSettings) -> str:
    """Where to look when it does not answer."""
    if embedded(settings) is not None or holder(settings.state) is not None:
        status, logs = in_folder("etude status", settings), in_folder(f"etude logs {service}", settings)
        return f"`{status}` says what the {service} waits on, `{logs}` why"
    return f"Does a {service} run on this bus (ETUDE_BUS)? `docker compose ps` or `kubectl get pods` shows it"


def _outcome(word: RunCommand) -> str:
    match word.action:
        case "pause" if word.drain:
            return "is paused: attempts in hand are finished, and what is complete is trained."
        case "pause":
            return "is paused: attempts in hand are finished, and the trainer stops after the step in hand."
        case "stop":
            return "is stopping: attempts in hand are dropped, and what is complete is trained."
        case _:
            return "is running again."


def answer(listener: Listener, command: RunCommand) -> RunStatus | None:
    """Return how the run stood when the scheduler had applied the command; None: it has not answered yet."""
    return next((new for new in listener.said if isinstance(new, RunStatus) and new.answers == command.id), None)


async def answered(listener: Listener, command: RunCommand, settings: ServiceSettings) -> RunStatus:
    """Wait for the scheduler's answer, and return it. Raises Refused."""
    await listener.until(lambda: answer(listener, command) is not None, ANSWER_WITHIN_S)
    if (status := answer(listener, command)) is None:
        raise Refused(
            f"{command.action} is said to {command.run}, and no scheduler has answered within {ANSWER_WITHIN_S:.0f} s; the next "
            f"one that comes obeys it. {unanswered('scheduler', settings)}"
        )
    return status


def too_late(command: RunCommand, run: Standing) -> Refused:
    """Return the refusal of a command that found the run in another state."""
    return Refused(f"{command.action} came too late: {run.run} is {run.state}{f': {run.why}' if run.why else ''}")


async def _ended(listener: Listener, run: Standing, say: Say) -> None:
    if await listener.until(lambda: run.state is RunState.finished, END_WITHIN_S):
        say(f"{run.run} is finished, at step {run.step}.")
    else:
        say(f"{run.run} has not ended within {END_WITHIN_S:.0f} s, and goes on ending; `etude runs` says when it has.")


async def _gone_back(
    listener: Listener, word: RunCommand, run: Standing, incarnation: int, settings: ServiceSettings, say: Say
) -> None:
    """The trainer obeys this one, not the scheduler: it publishes the version again, as a new incarnation. Raises Refused."""
    step = run.versions[word.serial or 0]
    say(
        f"{run.run} is told to go back to version {word.serial} (step {step}); the trainer does after the step in hand."
    )

    def republished() -> PolicyPublished | None:
        said = (new for new in listener.said if isinstance(new, PolicyPublished) and new.run == word.run)
        return next((new for new in said if new.incarnation > incarnation and new.step == step), None)

    def refused() -> Alert | None:
        said = (new for new in listener.said if isinstance(new, Alert) and new.run == word.run)
        return next((new for new in said if new.name == "rollback_refused"), None)

    def passed_over() -> bool:
        status = answer(listener, word)
        return status is not None and (status.rollback is None or status.rollback.id != word.id)

    await listener.until(lambda: bool(republished() or refused() or passed_over()), BACK_WITHIN_S)
    if passed_over():
        raise too_late(word, run)
    if alert := refused():
        raise Refused(f"{run.run}: {alert.what}")
    if (version := republished()) is None:
        raise Refused(
            f"{run.run} has not gone back within {BACK_WITHIN_S:.0f} s; the word stands, and the trainer obeys it when it "
            f"can. {unanswered('trainer', settings)}"
        )
    say(f"{run.run} is {run.state}, and goes on from there: version {version.serial}.")
