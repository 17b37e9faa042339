"""`etude start`: a run on a platform whose services run already, wherever that is.

A trainer and the engines follow one run, the one started last, and do not come back to an earlier one: that is why a run is
not started beside another that goes on, unless it gets a trainer and engines of its own (`beside`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import typer

from etude.acting import author, in_folder, require_listeners, unanswered
from etude.demo import DemoOptions, prepare
from etude.demo.background import in_thread
from etude.demo.prepare import DemoError
from etude.standing import HEARD, Listener, Standing
from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus, BusUnavailable
from shared.contracts import topics
from shared.contracts.ids import OPEN_EVALUATIONS
from shared.contracts.life import RunState
from shared.contracts.messages import EvalRequested, RunCommand
from shared.contracts.run import Ref, RunConfig
from shared.objects import ObjectDamaged, ObjectMissing
from shared.problems.importing import read_lines
from shared.settings import ServiceSettings, Told, read

SCHEDULER = "scheduler"  # the group that takes up what is said of runs (services/scheduler/service.py)
TAKEN_WITHIN_S, LOOK_S = 30.0, 0.3
REFUSED_WITHIN_S = 1.0  # the scheduler says so right after it has taken the word up
COMMAND = "etude start"


async def announce(options: DemoOptions, settings: ServiceSettings) -> str:
    """Uploads what the run starts with, publishes `start`, and returns the run's id. Raises DemoError."""
    config, ref = await _prepared(options, settings)
    bus = buses.connect(settings.bus_url, client="etude-start")
    try:
        await _publish(bus, config.run, ref, [])
    finally:
        await bus.close()
    return config.run


async def begin(
    options: DemoOptions, settings: ServiceSettings, *, instead: bool, paused: bool = False, beside: bool = False
) -> str:
    """The same, and returns when the scheduler has taken the run up. `instead`: of those that go on, which are stopped. `paused`:
    it waits to be resumed. `beside`: those that go on keep their trainer and engines, and this run waits for its own. Raises
    DemoError, where nothing was said, and what else stands in the way."""
    require_listeners(settings)
    bus = buses.connect(settings.bus_url, client="etude-start")
    try:
        async with Listener(bus, (*HEARD, topics.RUNS_COMMANDS)) as listener:
            _require_none(listener, settings, instead or beside)
            config, ref = await _prepared(options, settings)
            _require_none(listener, settings, instead or beside)  # it took a while: somebody else may have started one
            going = [] if beside else _going(listener)
            await _publish(bus, config.run, ref, going, paused=paused, beside=beside)
            for run in going:
                typer.echo(f"{run} is told to stop.")
            for line in [] if beside else await asyncio.to_thread(lambda: list(_open_measurements(settings))):
                typer.echo(line)
            if not await _taken_up(bus):
                raise DemoError(
                    f"{config.run} is said to start, and no scheduler has taken it up within {TAKEN_WITHIN_S:.0f} s; the next "
                    f"one that comes starts it. {unanswered('scheduler', settings)}"
                )
            await _require_accepted(listener, config.run)
            return config.run
    finally:
        await bus.close()


def run(
    options: DemoOptions, *, instead: bool = False, paused: bool = False, beside: bool = False, check: bool = False
) -> int:
    """Returns the exit code: 0 started, 1 something stands in the way. `check`: starts nothing."""
    try:
        settings = read(ServiceSettings, state=options.state)
        # A configuration that no run can be of is told before a platform is asked for.
        planned = prepare.planned("r", options)
        if check:
            _require_problems(options, planned.schedule.groups_per_step)
            typer.echo("A run can be started with this configuration; nothing was started.")
            return 0
        name = asyncio.run(begin(options, settings, instead=instead, paused=paused, beside=beside))
    except (DemoError, Told, ValueError) as error:
        typer.echo(str(error), err=True)
        return 1
    if paused:
        first, then = in_folder("etude measure", settings), in_folder("etude resume", settings)
        typer.echo(
            f"Run {name} is started and paused. `{first}` says how good its policy is; `{then}` lets it practise."
        )
    else:
        typer.echo(f"Run {name} is started. `{in_folder('etude runs', settings)}` says how it stands.")
    if beside:
        typer.echo(
            "It waits for a trainer and an engine of its own, which are started with the platform's settings and these: "
            f"`ETUDE_TRAINER_RUN={name} python -m services.trainer`, `ETUDE_RUN={name} python -m services.inference`."
        )
    return 0


def _require_problems(options: DemoOptions, groups_per_step: int) -> None:
    """Check, without a sandbox and without the base policy, that a run's problems can be read. A pack that is not there yet is
    made when the run starts. Raises DemoError, ProblemError."""
    if options.problems:
        list(read_lines(options.problems))
    elif options.pack and (options.pack / "manifest.json").exists():
        prepare.parts_of(options.pack, "held_out")
        prepare.require_a_step(str(options.pack), prepare.problems_in(options.pack, "rl"), groups_per_step)


async def _prepared(options: DemoOptions, settings: ServiceSettings) -> tuple[RunConfig, Ref]:
    if options.pack and not options.problems and not (options.pack / "manifest.json").exists():
        await in_thread(prepare.make_pack, options.pack)
    objects = await asyncio.to_thread(stores.connect, settings.objects_url)
    return await in_thread(prepare.new_run, objects, replace(options, state=settings.state))


def _going(listener: Listener) -> list[str]:
    """Runs that would go on if nobody stopped them."""
    return [one.run for one in _in_the_way(listener) if one.state is not RunState.stopping]


def _in_the_way(listener: Listener) -> list[Standing]:
    """Runs whose trainer and engines would go to the new one."""
    return [one for one in listener.standings.unfinished if not one.beside]


def _require_none(listener: Listener, settings: ServiceSettings, anyway: bool) -> None:
    if starting := listener.standings.starting:
        raise DemoError(
            f"{', '.join(starting)}: said to start, and no scheduler has answered. {unanswered('scheduler', settings)}"
        )
    unfinished = _in_the_way(listener)
    if not unfinished or anyway:
        return
    found = ", ".join(f"{one.run} is {one.state}" for one in unfinished)
    first = " and ".join(f"`{in_folder(f'etude stop {run}', settings)}`" for run in _going(listener))
    wait = f"wait for its end (`{in_folder('etude runs', settings)}`)"
    instead = "--replace or --beside (`etude start --help`)"
    raise DemoError(f"{found}; it would get no trainer and no engine any more: {first or wait} first, or {instead}")


def _open_measurements(settings: ServiceSettings) -> Iterator[str]:
    """Yield a line for each open measurement: which one it is, and how it can go on. Blocks while it reads the store."""
    objects = stores.connect(settings.objects_url)
    for key in sorted(objects.list(OPEN_EVALUATIONS)):
        with contextlib.suppress(ObjectMissing, ObjectDamaged, msgspec.MsgspecError):  # it ended meanwhile
            one = msgspec.json.decode(objects.get(objects.head(key)), type=EvalRequested)
            yield (
                f"The measurement {one.eval} of {one.run} is open, and the engines leave version {one.serial} for the new run, "
                "which does not wait for it. It goes on where an engine for evaluations serves that version "
                "(ETUDE_POOL=evaluation python -m services.inference); without one it ends without a verdict."
            )


async def _publish(
    bus: Bus, run: str, config: Ref, instead_of: Sequence[str], *, paused: bool = False, beside: bool = False
) -> None:
    """Together and in order, so that the trainer goes from the ones to the other, and that nothing begins between a start and its
    pause."""
    by, reason = author(COMMAND), f"{run} is started instead"
    words = [RunCommand(run=name, action="stop", reason=reason, by=by) for name in instead_of]
    words.append(RunCommand(run=run, action="start", config=config, by=by, beside=beside))
    if paused:
        words.append(RunCommand(run=run, action="pause", reason="started with --paused", by=by))
    await bus.publish_many([(topics.RUNS_COMMANDS, word.run, word) for word in words])


async def _taken_up(bus: Bus) -> bool:
    """Whether the scheduler has acknowledged all that was said. It does when what follows from it is in the ledger."""
    until = time.monotonic() + TAKEN_WITHIN_S
    while True:
        with contextlib.suppress(BusUnavailable):  # of a group that moves: it is asked again
            if not (await bus.lag([topics.RUNS_COMMANDS], SCHEDULER))[topics.RUNS_COMMANDS.name]:
                return True
        if time.monotonic() > until:
            return False
        await asyncio.sleep(LOOK_S)


async def _require_accepted(listener: Listener, run: str) -> None:
    def refused() -> bool:
        standing = listener.standings.of(run)
        return standing is not None and standing.state is RunState.finished

    if await listener.until(refused, REFUSED_WITHIN_S):
        standing = listener.standings.of(run)
        raise DemoError(f"{run} has ended at once: {standing.why if standing else ''}")
