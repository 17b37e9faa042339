"""Reads what is said of a run, and keeps a target up to date with it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import msgspec

from etude.acting import NAMED, embedded, in_folder
from etude.figures import sink
from etude.figures.points import Heard, Kind, past
from etude.standing import Standings
from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus, BusUnavailable
from shared.contracts import topics as t
from shared.contracts.codec import TIME_HEADER
from shared.contracts.messages import RunControl
from shared.contracts.run import RunConfig
from shared.ledger.transitions import RunState
from shared.objects import ObjectDamaged, ObjectMissing
from shared.settings import ServiceSettings, Told

TOPICS = (t.RUNS_CONTROL, t.POLICIES_PUBLISHED, t.STEPS_COMMITTED, t.EVALS_FINISHED)
ANSWER_WITHIN_S = 30.0
GATHER_S = 1.0  # what comes in so short a time is written together

Say = Callable[[str], None]


class NoRun(Told, ValueError):
    """Which runs there are, and the way out."""


class Ear:
    """Use with `async with`: it begins when everything that was said has been heard, and goes on listening. Raises
    BusUnavailable."""

    def __init__(self, bus: Bus) -> None:
        self.heard: list[Heard] = []
        self._bus = bus
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Ear:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._bus.ping()
        except TimeoutError:
            raise BusUnavailable(f"the bus has not answered within {ANSWER_WITHIN_S:.0f} s") from None
        deliveries = self._bus.deliveries(TOPICS, None, 1024)
        self._task = asyncio.create_task(self._listen(deliveries))
        try:
            await deliveries.caught_up()
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self, deliveries: Any) -> None:
        async for delivery in deliveries:
            self.heard.append(Heard(delivery.message, _sent_at(delivery.headers)))
            delivery.done()
            self._news.set()

    async def news(self) -> None:
        """Returns when more was said. Raises BusUnavailable."""
        assert self._task is not None
        waiting = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            self._task.result()
            raise BusUnavailable("the bus ended the reading")
        await asyncio.sleep(GATHER_S)
        self._news.clear()

    def keep(self, run: str) -> None:
        """Forgets what was said of other runs."""
        self.heard[:] = [one for one in self.heard if one.message.run == run]


def _sent_at(headers: Mapping[str, str]) -> float:
    try:
        at = float(headers.get(TIME_HEADER, "0"))
    except ValueError:
        return 0.0
    return at if math.isfinite(at) and at > 0 else 0.0


async def export(settings: ServiceSettings, run: str, target: str, *, follow: bool, say: Say) -> None:
    """Writes what there is of `run` (empty: the only one) to `target`; with `follow` goes on until the run is finished. Raises
    NoRun, NotWritten, BusUnavailable."""
    file = embedded(settings)
    if file is not None and not file.exists():
        raise NoRun(_none(settings))
    bus = buses.connect(settings.bus_url, client="etude-figures")
    try:
        async with Ear(bus) as ear:
            word = _chosen(ear, run, settings)
            ear.keep(word.run)
            out = sink.connect(target, word.run, _parameters(settings, word, say))
            state = RunState.announced
            try:
                held, taken = sink.marks(out), 0
                while True:
                    told = past(word.run, ear.heard)
                    state = told.state
                    taken += sink.update(out, told, held)
                    if not follow or state is RunState.finished:
                        break
                    await ear.news()
                    ear.keep(word.run)
            finally:
                out.close(state)
            kinds = [row.kind for row in told.rows]
            say(
                f"{word.run} is {state}: {kinds.count(Kind.train)} steps, {kinds.count(Kind.eval)} evaluations; {taken} points "
                f"were new to {target}."
            )
    finally:
        await bus.close()


def _chosen(ear: Ear, run: str, settings: ServiceSettings) -> RunControl:
    """The word that started the run. Raises NoRun."""
    standings, starts = Standings(), dict[str, RunControl]()
    for message, at in ear.heard:
        if isinstance(message, RunControl):
            standings.hear(message, at)
            if message.action == "start" and message.config is not None:
                starts.setdefault(message.run, message)
    names = [one.run for one in standings.runs]
    newest = ", ".join(names[: -NAMED - 1 : -1])
    if not names:
        raise NoRun(_none(settings))
    if not run and len(names) > 1:
        raise NoRun(f"RUN: left out, and there are {len(names)} runs; name one, the newest are {newest}")
    if run and run not in names:
        raise NoRun(f"run {run!r}: not known here; the newest are {newest}")
    return starts[run or names[0]]


def _none(settings: ServiceSettings) -> str:
    where = "this bus" if embedded(settings) is None else settings.state
    return f"{where}: no run was started here. `{in_folder('etude start', settings)}` begins one"


def _parameters(settings: ServiceSettings, word: RunControl, say: Say) -> sink.Parameters:
    """What the run was started with, flat. Where the object store does not have it the figures are worth writing all the
    same."""
    assert word.config is not None
    try:
        stored = stores.connect(settings.objects_url).get(word.config)
        return flat(msgspec.to_builtins(msgspec.json.decode(stored, type=RunConfig)))
    except (OSError, ValueError, ObjectMissing, ObjectDamaged) as error:
        say(f"What the run learns with is left out: {word.config.key}: {error}")
        return {}


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """`{"train": {"kl": 0.1}}` → `{"train.kl": 0.1}`. Of a reference its key; lists as JSON; what is none is left out."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            if value.keys() == {"key", "size", "checksum"}:
                found[f"{prefix}{name}"] = value["key"]
            else:
                found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, str | int | float | bool):
            found[f"{prefix}{name}"] = value
        elif value is not None:
            found[f"{prefix}{name}"] = json.dumps(value)
    return found
