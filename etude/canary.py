"""`etude rollback --canary`: one engine first, measured, then all.

An engine of the evaluation pool goes to both versions, one after the other: the one to go back to, and the newest. The others
hear nothing until it is known that the first solves no fewer of the run's held-out problems, or not many.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rich.console import Console

from etude.acting import Refused, act, fitting, require_listeners
from etude.demo.report import in_points, paired
from etude.demo.watch import say
from etude.hearing import past
from etude.measuring import done, evaluate
from etude.standing import HEARD, Standings
from shared import objects as stores
from shared.settings import ServiceSettings


class Trial(NamedTuple):
    """`within`: so many points fewer are borne."""

    problems: int
    samples: int
    within: float


def verdict(there: dict[str, Any], now: dict[str, Any], trial: Trial) -> tuple[bool, str]:
    """Whether all may go there from what is now, and the figures in words. Both are reports of an evaluation."""
    gain = paired(now, there, "solved")
    return 100 * gain["mean"] >= -trial.within, f"{in_points(gain)} on {gain['problems']} problems"


async def go_back(
    settings: ServiceSettings, run: str, version: int, reason: str, trial: Trial, console: Console
) -> None:
    """Raises Refused, also where the version is too much worse; Stalled, NoVerdict, BusUnavailable."""
    name = await _fitting(settings, run, version)
    why = await tried(
        settings, name, version, None, trial, console, reason, "Nobody was told to go back; without --canary all do"
    )
    await act(settings, "rollback", name, lambda text: say(console, name, text), reason=why, version=version)


async def tried(
    settings: ServiceSettings,
    run: str,
    version: int,
    beside: int | None,
    trial: Trial,
    console: Console,
    reason: str,
    otherwise: str,
) -> str:
    """The reason with what was found behind it, where `version` solves no fewer problems than `beside` (None: the newest), or not
    many. Raises Refused with `otherwise` where it does; Stalled, NoVerdict, BusUnavailable."""
    serial, now = await measured(settings, run, beside, trial, console)
    _, there = await measured(settings, run, version, trial, console)
    held, said = verdict(there, now, trial)
    found = f"version {version} beside version {serial}: {said}"
    if not held:
        raise Refused(f"{found}; --within bears {trial.within:g} fewer. {otherwise}")
    say(console, run, found)
    return f"{reason}; {found}" if reason else found


async def _fitting(settings: ServiceSettings, run: str, version: int) -> str:
    """The run's name. Refused before anything is measured is what would be refused after it."""
    require_listeners(settings)
    standings = Standings()
    await past(settings, HEARD, standings.hear, client="etude-canary")
    return fitting(standings, run, "rollback", version).run


async def measured(
    settings: ServiceSettings, run: str, version: int | None, trial: Trial, console: Console
) -> tuple[int, dict[str, Any]]:
    """The version (None: the newest) and the report of its measurement. Raises as `evaluate` does."""
    found = await evaluate(settings, run, version, problems=trial.problems, samples=trial.samples, console=console)
    report = stores.connect(settings.objects_url).get(found.ended[found.name].report)
    return found.serial, json.loads(report)


def run(settings: ServiceSettings, name: str, version: int, reason: str, trial: Trial) -> int:
    """Returns the exit code, as `measuring.done`."""
    console = Console(stderr=True)
    return done(go_back(settings, name, version, reason, trial, console), console)[1]
