"""`python -m tests.chaos [--kills 100] [--seed 1] [--zombies 6] [--outages 60]
[--failovers postgres,redis,minio] [--json FILE]`

Strikes a run on the servers of `make servers` and audits its ledger. Exit code 0: nothing lost, nothing trained twice,
nothing too old, and everybody came back. 1: not so. 2: no servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from infra.servers import state as servers
from services.scheduler.audit import Report
from tests.chaos import report as reports
from tests.chaos.pairs import KINDS, Pair, standing_by
from tests.chaos.platform import NotInTime, Platform, running
from tests.chaos.schedule import VICTIMS, kills
from tests.chaos.strikes import (
    SERVERS,
    Outcome,
    fail_over,
    freeze_scheduler,
    freeze_trainer,
    freeze_worker,
    kill,
    outage,
)

END_WITHIN_S = 300.0
Told = Callable[[Outcome], None]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Strikes a run and audits its ledger.")
    parser.add_argument("--kills", type=int, default=100, help="kill -9 of services, in all")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between kills, in the mean")
    parser.add_argument("--victims", default=",".join(VICTIMS), help="who is killed, by commas")
    parser.add_argument(
        "--zombies", type=int, default=6, help="freezes past the lease: worker, trainer, scheduler in turn"
    )
    parser.add_argument("--outages", type=float, default=60.0, help="seconds that each server is away; 0: none is")
    parser.add_argument("--servers", default=",".join(SERVERS), help="which servers, by commas")
    parser.add_argument("--modes", default="stopped,frozen", help="how they are away, by commas")
    parser.add_argument(
        "--failovers",
        default="",
        help=f"servers that another takes over from, by commas, in pairs of our own: {','.join(KINDS)}",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until the first groups are trained")
    parser.add_argument("--pack", type=Path, help="a pack (etude tasks mutate); default: 900 problems of our own")
    parser.add_argument("--state", type=Path, help="keeps logs there; default: a folder that is removed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    options.victims, options.servers, options.modes, options.failovers = (
        tuple(filter(None, text.split(",")))
        for text in (options.victims, options.servers, options.modes, options.failovers)
    )
    for what, found, allowed in (
        ("--victims", options.victims, VICTIMS),
        ("--servers", options.servers, SERVERS),
        ("--modes", options.modes, ("stopped", "frozen")),
        ("--failovers", options.failovers, tuple(KINDS)),
    ):
        if unknown := set(found) - set(allowed):
            parser.error(f"{what}: found {sorted(unknown)[0]!r}; allowed: {', '.join(allowed)}")
    return options


async def strike(
    options: argparse.Namespace, state: Path, console: Console
) -> tuple[list[Outcome], Report | None, str]:
    """What was done and became of it, the audit (None: not reached), and what went wrong in words."""
    outcomes: list[Outcome] = []

    def told(outcome: Outcome) -> None:
        outcomes.append(outcome)
        words = outcome.failed or f"{outcome.recovery_s:.1f} s"
        console.print(f"{time.strftime('%H:%M:%S')} {outcome.kind} {outcome.victim}: {words}", highlight=False)

    report, trouble = None, ""
    try:
        async with _platform(options, state) as (platform, pairs):
            try:
                for pair in pairs:
                    told(await fail_over(platform, pair))
                trainer = await _zombies(platform, options, told)
                await _kills(platform, options, trainer, told)
                await _outages(platform, options, trainer, told)
                await platform.stop_run(END_WITHIN_S)
            finally:
                report = await asyncio.to_thread(platform.audit)
    except NotInTime as error:
        trouble = str(error)
    return outcomes, report, trouble


@contextlib.asynccontextmanager
async def _platform(options: argparse.Namespace, state: Path) -> AsyncIterator[tuple[Platform, list[Pair]]]:
    """A run that trains, and the pairs of servers that it uses in place of those of the environment."""
    with standing_by(options.failovers, state.with_name("pairs")) as pairs:
        variables = {name: value for pair in pairs for name, value in pair.variables.items()}
        with patch.dict(os.environ, variables):
            async with running(state, seed=options.seed, patience_s=options.patience, pack=options.pack) as platform:
                yield platform, pairs


async def _zombies(platform: Platform, options: argparse.Namespace, told: Told) -> str:
    """Returns the name under which the trainer runs afterwards."""
    trainer = "trainer"
    for number in range(options.zombies):
        match number % 3:
            case 0:
                told(await freeze_worker(platform, f"rollout-{number}"))
            case 1:
                successor = f"trainer-{number}"
                told(await freeze_trainer(platform, trainer, successor))
                trainer = successor
            case _:
                told(await freeze_scheduler(platform, f"scheduler-{number}"))
    return trainer


async def _kills(platform: Platform, options: argparse.Namespace, trainer: str, told: Told) -> None:
    """Strikes overlap: the next one does not wait until the last victim is back, unless it is the same."""
    recovering: dict[str, asyncio.Task[None]] = {}

    async def one(victim: str) -> None:
        told(await kill(platform, victim))

    for planned in kills(options.seed, options.kills, options.every, options.victims or VICTIMS):
        await asyncio.sleep(planned.after_s)
        victim = trainer if planned.victim == "trainer" else planned.victim
        if victim in recovering:
            await recovering[victim]
        recovering[victim] = asyncio.create_task(one(victim))
    await asyncio.gather(*recovering.values())


async def _outages(platform: Platform, options: argparse.Namespace, trainer: str, told: Told) -> None:
    if options.outages > 0:
        for server in options.servers:
            for mode in options.modes:
                told(await outage(platform, server, mode, options.outages, trainer))


def main(argv: list[str] | None = None) -> int:
    from tests.servers import own_platform

    options, console = arguments(argv), Console()
    missing = [name for name in SERVERS if name not in servers.read() or servers.read()[name].process is None]
    if missing:
        print(f"{', '.join(missing)}: not running; `make servers` starts them", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="etude-chaos-") as folder, own_platform() as variables:
        os.environ.update(variables)
        began = time.monotonic()
        outcomes, report, trouble = asyncio.run(strike(options, options.state or Path(folder) / "state", console))
        reports.show(outcomes, report, trouble, console)
        if options.json:
            settings = {"kills": options.kills, "seed": options.seed, "zombies": options.zombies}
            settings |= {"outage_s": options.outages, "seconds": round(time.monotonic() - began, 1)}
            reports.write(options.json, outcomes, report, trouble, settings)
    return 0 if reports.sound(outcomes, report, trouble) else 1


if __name__ == "__main__":
    raise SystemExit(main())
