"""`etude measure`: how good a version of a run is on its held-out problems, by the platform that runs it.

The same measurement (version, problems, samples) is asked for once: called again, the command waits for it, or shows what came
of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from etude.acting import Refused, chosen, require_listeners
from etude.best import Kind, deleted, kind
from etude.demo.conduct import Conductor, Stalled, came_to_a_verdict
from etude.demo.report import BEST_OF_8, BEST_OF_K, figures_of, in_points, paired, within
from etude.demo.watch import Evaluation, evaluation_end, say, say_error, watching
from etude.evaluate import count_objects
from etude.hearing import Hearing, past
from etude.standing import Standing, Standings
from shared import bus as buses
from shared import objects as stores
from shared.contracts import topics as t
from shared.contracts.life import RunState
from shared.contracts.messages import EvalFinished, PolicyApplied
from shared.contracts.run import RunConfig
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.output import require_writable, write_whole
from shared.settings import ServiceSettings, Told

WIDTH = 160  # of the table where no terminal says its own
SERVED_WITHIN_S = 60.0
MOVING = (RunState.running, RunState.stopping)  # versions are published
TOPICS = (t.RUNS_STATE, t.POLICIES_PUBLISHED, t.POLICIES_APPLIED, t.EVALS_FINISHED)


class Known:
    """What was said of runs, as far as a measurement needs it."""

    def __init__(self) -> None:
        self.standings = Standings()
        self.replicas: dict[str, PolicyApplied] = {}
        self.measured: dict[tuple[str, str], EvalFinished] = {}

    def hear(self, message: Any, at: float) -> None:
        self.standings.hear(message, at)
        match message:
            case PolicyApplied():
                self.replicas.pop(message.replica, None)  # the last word stands last
                self.replicas[message.replica] = message
            case EvalFinished():
                self.measured[message.run, message.eval] = message

    def chosen(self, run: str, version: int | None) -> tuple[Standing, int]:
        """The run (empty: the one started last) and its version (None: the newest). Raises Refused."""
        standing = chosen(self.standings, run or self.standings.followed)
        serial = max(0, standing.serial) if version is None else version
        if serial and serial not in standing.versions:
            raise Refused(f"--version {serial}: {standing.run} has published {_span(standing)}")
        return standing, serial

    def served(self, run: Standing, serial: int) -> bool:
        """By an engine that stays with it: those of a running run go from version to version."""
        moving = run.state in MOVING
        return any(
            one.on_request or (one.serial == serial and (one.pool == "evaluation" or not moving))
            for one in self._replicas_of(run)
        )

    def unserved(self, run: Standing, serial: int) -> str:
        """What is there instead, and the way out: an attempt that no replica can serve would wait, and be lost in the end."""
        there = ", ".join(f"{one.replica} serves {one.serial}" for one in self._replicas_of(run))
        moving = f"{run.run} is {run.state}; "
        if run.state in MOVING:
            way_out = f"`etude pause {run.run}` first" if run.state is RunState.running else "wait for its end"
            moving = f"{run.run} is {run.state}, and its engines go from version to version: {way_out}, or "
        return (
            f"version {serial}: {there or 'no replica serves this run'}. {moving}start an engine for evaluations: "
            "ETUDE_POOL=evaluation python -m services.inference"
        )

    def _replicas_of(self, run: Standing) -> list[PolicyApplied]:
        """One that takes over the address of another replaces it: it is the same place, started again."""
        places = {one.url: one for one in self.replicas.values()}
        return [one for one in places.values() if one.ok and one.run == run.run and one.pool != "serving"]


def _span(run: Standing) -> str:
    return f"versions {min(run.versions)} to {max(run.versions)}" if run.versions else "none yet"


class Which(NamedTuple):
    """`versions`: these, empty: the newest; `every`: instead all that are so far apart, and the newest."""

    versions: tuple[int, ...] = ()
    every: int = 0


class Evaluated(NamedTuple):
    """What was asked for, and every evaluation of its run that has ended, by name."""

    run: Standing
    serial: int
    name: str
    ended: dict[str, EvalFinished]


async def measure(
    settings: ServiceSettings, run: str, which: Which, *, problems: int, samples: int, console: Console
) -> list[Measured]:
    """Measures one version after the other, and returns every measurement of this run, versions rising. Raises as `evaluate`
    does."""
    if which.every:
        run, which = await _every(settings, run, which.every)
    for version in which.versions or (None,):
        found = await evaluate(settings, run, version, problems=problems, samples=samples, console=console)
    return compared(stores.connect(settings.objects_url), found.ended.values(), found.run.versions)


async def _every(settings: ServiceSettings, run: str, step: int) -> tuple[str, Which]:
    """The run's name, and its versions from 0 on, `step` apart, and its newest: those that can be built still. Raises Refused."""
    require_listeners(settings)
    objects, known = stores.connect(settings.objects_url), Known()
    await past(settings, TOPICS, known.hear, client="etude-measure")
    standing, newest = known.chosen(run, None)
    wanted = {newest, *(serial for serial in standing.versions if serial % step == 0)}
    there = [serial for serial in sorted(wanted) if not deleted(objects, standing.run, serial)]
    return standing.run, Which(tuple(there))


async def evaluate(
    settings: ServiceSettings, run: str, version: int | None, *, problems: int, samples: int, console: Console
) -> Evaluated:
    """Asks for it unless that was done before, and waits for the verdict. Raises Refused, Stalled, NoVerdict,
    BusUnavailable."""
    require_listeners(settings)
    objects, bus = stores.connect(settings.objects_url), buses.connect(settings.bus_url, client="etude-measure")
    try:
        known = Known()
        async with Hearing(bus, TOPICS, known.hear) as hearing:
            standing, serial = known.chosen(run, version)
            config = msgspec.json.decode(objects.get(standing.configs[0]), type=RunConfig)
            if config.eval_pack is None or config.eval_pack_hidden is None:
                raise Refused(
                    f"{standing.run} was started without held-out problems (eval_pack): nothing to measure on"
                )
            there = count_objects(objects, config.eval_pack)
            problems = min(problems or there, there)
            name = f"version-{serial}-{problems}x{samples}"
            async with Conductor(bus, objects, standing.run) as conductor:
                measured = conductor.progress.evaluations
                measured |= {name: one for (of, name), one in known.measured.items() if of == standing.run}
                if conductor.verdict(name) is None:
                    if deleted(objects, standing.run, serial):
                        raise Refused(
                            f"version {serial} of {standing.run}: its weights are deleted; no engine can build it"
                        )
                    # An engine needs a moment to take up a run; those of one that goes on pass by.
                    patience_s = 0.0 if standing.state in MOVING else SERVED_WITHIN_S
                    if not await hearing.until(lambda: known.served(standing, serial), patience_s):
                        raise Refused(known.unserved(standing, serial))
                    began, total = time.monotonic(), problems * (samples + 1)  # one more, greedy
                    title = f"{standing.run}, version {serial}"
                    async with watching(console, title, total, Evaluation(conductor.progress, serial, total)):
                        report = await conductor.evaluate(name, serial, config, problems=problems, samples=samples)
                    say(console, title, evaluation_end(report, time.monotonic() - began))
                return Evaluated(standing, serial, name, dict(measured))
    finally:
        await bus.close()


class Measured(NamedTuple):
    """`figures`: as `report.figures_of`. `gain`: pass@1 beside the earliest version that was measured on the same problems with
    as many attempts, as `report.paired`; of itself None."""

    evaluation: str
    version: int
    step: int
    figures: dict[str, Any]
    gain: dict[str, Any] | None


def compared(objects: Objects, ended: Iterable[EvalFinished], steps: Mapping[int, int]) -> list[Measured]:
    """Those that came to a verdict, versions rising. `steps`: of each published version."""
    found = sorted(filter(came_to_a_verdict, ended), key=lambda one: (one.serial, one.eval))
    first: dict[Kind, dict[str, Any]] = {}
    rows = []
    for one in found:
        report = json.loads(objects.get(one.report))
        alike = first.setdefault(kind(report), report)
        gain = None if alike is report else paired(alike, report, "solved")
        rows.append(Measured(one.eval, one.serial, steps.get(one.serial, 0), figures_of(report), gain))
    return rows


def table(rows: Iterable[Measured]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for column in (
        "version",
        "step",
        "problems",
        "pass@1",
        "",
        "first edit",
        "best of k",
        "greedy",
        "tokens per solved",
        "gain",
    ):
        shown.add_column(column, no_wrap=True, justify="right")
    for row in rows:
        f = row.figures
        k, best = (f["k"], f[BEST_OF_K]) if BEST_OF_K in f else (8, f[BEST_OF_8])
        gain = in_points(row.gain).replace(" points", "") if row.gain else ""
        shown.add_row(
            str(row.version),
            str(row.step),
            f"{f['problems']} × {f['samples']}",
            f"{f['pass_at_1']:.1%}",
            within(f["ci95"], "{:.1%}").strip(),
            f"{f['first_edit']:.1%}",
            f"{best:.1%} of {k}",
            "–" if f["greedy"] is None else f"{f['greedy']:.1%}",
            "–" if f["tokens_per_solved"] is None else f"{f['tokens_per_solved']:,.0f}",
            gain,
        )
    return shown


T = TypeVar("T")


def done(work: Coroutine[Any, Any, T], console: Console) -> tuple[T | None, int]:
    """What came of it, and the exit code: 0 it is there, 1 something stands in the way, 130 interrupted."""
    try:
        return asyncio.run(work), 0
    except (Stalled, Told) as error:
        say_error(console, error)
        return None, 1
    except (ObjectMissing, ObjectDamaged) as error:
        console.print(
            f"what the run or a measurement of it is made of: {error}", highlight=False, markup=False, soft_wrap=True
        )
        return None, 1
    except KeyboardInterrupt:
        console.print("Not waited for any longer. What was asked for goes on: the same command shows what comes of it.")
        return None, 130


def run(settings: ServiceSettings, name: str, which: Which, *, problems: int, samples: int, out: Path | None) -> int:
    """Returns the exit code, as `done`."""
    console = Console(stderr=True)
    try:
        if out:
            require_writable(out, "--json")
    except Told as error:
        say_error(console, error)
        return 1
    rows, code = done(measure(settings, name, which, problems=problems, samples=samples, console=console), console)
    if rows is None:
        return code
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table(rows))
    try:
        if out:
            write_whole(out, json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    except Told as error:
        say_error(console, error)
        return 1
    return 0
