"""Reads what is said of a run, and keeps a target up to date with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from etude.acting import NAMED, in_folder
from etude.figures import sink
from etude.figures.points import Heard, Kind, past
from etude.hearing import Hearing, embedded, silent
from etude.standing import Standing, Standings
from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import topics as t
from shared.contracts.flat import flat
from shared.contracts.life import RunState
from shared.contracts.messages import RunStatus
from shared.contracts.run import Ref, RunConfig
from shared.objects import ObjectDamaged, ObjectMissing
from shared.settings import ServiceSettings, Told

TOPICS = (t.RUNS_STATE, t.POLICIES_PUBLISHED, t.STEPS_COMMITTED, t.EVALS_FINISHED)
GATHER_S = 1.0  # what comes in so short a time is written together

Say = Callable[[str], None]


class NoRun(Told, ValueError):
    """Which runs there are, and the way out."""


class Ear(Hearing):
    """What was said of every run, then of one."""

    def __init__(self, bus: Bus) -> None:
        self.heard: list[Heard] = []
        super().__init__(bus, TOPICS, lambda message, at: self.heard.append(Heard(message, at)))

    def keep(self, run: str) -> None:
        """Forgets what was said of other runs."""
        self.heard[:] = [one for one in self.heard if one.message.run == run]


async def export(settings: ServiceSettings, run: str, target: str, *, follow: bool, say: Say) -> None:
    """Writes what there is of `run` (empty: the only one) to `target`; with `follow` goes on until the run is finished. Raises
    NoRun, NotWritten, BusUnavailable."""
    if silent(settings):
        raise NoRun(_none(settings))
    bus = buses.connect(settings.bus_url, client="etude-figures")
    try:
        async with Ear(bus) as ear:
            standing = _chosen(ear, run, settings)
            ear.keep(standing.run)
            out = sink.connect(target, standing.run, _parameters(settings, standing.configs[0], say))
            state = RunState.announced
            try:
                held, taken = sink.marks(out), 0
                while True:
                    told = past(standing.run, ear.heard)
                    state = told.state
                    taken += sink.update(out, told, held)
                    if not follow or state is RunState.finished:
                        break
                    await ear.news()
                    await asyncio.sleep(GATHER_S)
                    ear.keep(standing.run)
            finally:
                out.close(state)
            kinds = [row.kind for row in told.rows]
            say(
                f"{standing.run} is {state}: {kinds.count(Kind.train)} steps, {kinds.count(Kind.eval)} evaluations; {taken} points "
                f"were new to {target}."
            )
    finally:
        await bus.close()


def _chosen(ear: Ear, run: str, settings: ServiceSettings) -> Standing:
    """Raises NoRun."""
    standings = Standings()
    for message, at in ear.heard:
        if isinstance(message, RunStatus):
            standings.hear(message, at)
    names = [one.run for one in standings.runs]
    newest = ", ".join(names[: -NAMED - 1 : -1])
    if not names:
        raise NoRun(_none(settings))
    if not run and len(names) > 1:
        raise NoRun(f"RUN: left out, and there are {len(names)} runs; name one, the newest are {newest}")
    if (found := standings.of(run or names[0])) is None:
        raise NoRun(f"run {run!r}: not known here; the newest are {newest}")
    return found


def _none(settings: ServiceSettings) -> str:
    where = "this bus" if embedded(settings) is None else settings.state
    return f"{where}: no run was started here. `{in_folder('etude start', settings)}` begins one"


def _parameters(settings: ServiceSettings, config: Ref, say: Say) -> sink.Parameters:
    """What the run was started with, flat. Where the object store does not have it the figures are worth writing all the
    same."""
    try:
        stored = stores.connect(settings.objects_url).get(config)
        return flat(msgspec.to_builtins(msgspec.json.decode(stored, type=RunConfig)))
    except (OSError, ValueError, ObjectMissing, ObjectDamaged) as error:
        say(f"What the run learns with is left out: {config.key}: {error}")
        return {}
