"""A new run like one that was: when that may be, and with which configuration. Pure.

A trainer and the engines follow the run that was started last, and do not come back to an earlier one: as by `etude start`, no
run is started while they are needed by one that goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from services.console.board import RunBoard
from shared.contracts.life import UNFINISHED
from shared.contracts.run import Ref, RunConfig

MOST = {"seed": 2**31 - 1, "max_steps": 10**9, "minutes": 10**6}
SHOWN = 3  # runs named in a refusal


class Unfit(ValueError):
    """What was found, and what is allowed."""


def in_the_way(runs: Iterable[RunBoard]) -> str:
    """Why none may be started now; empty: one may."""
    going = [
        f"{run.run} is {run.state.value}"
        for run in runs
        if (run.state in UNFINISHED and not run.beside) or run.starting
    ]
    if not going:
        return ""
    more = f" and {len(going) - SHOWN} more" if len(going) > SHOWN else ""
    return f"{', '.join(going[:SHOWN])}{more}; it would get no trainer and no engine any more: stop it first, and wait for its end"


def like(config: RunConfig, run: str, changes: Mapping[str, str]) -> RunConfig:
    """`config` as that of `run`. `changes`: seed, max_steps, minutes; an empty one stays as it was. Raises Unfit."""
    seed = _whole("seed", changes.get("seed", ""), config.seed)
    schedule = msgspec.structs.replace(
        config.schedule,
        max_steps=_whole("max_steps", changes.get("max_steps", ""), config.schedule.max_steps),
        minutes=_minutes(changes.get("minutes", ""), config.schedule.minutes),
    )
    return msgspec.structs.replace(config, run=run, seed=seed, schedule=schedule)


def refs(config: RunConfig) -> list[Ref]:
    """The objects that a run of this configuration needs."""
    named = (
        config.base,
        config.pack,
        config.pack_hidden,
        config.surprise,
        config.probe,
        config.eval_pack,
        config.eval_pack_hidden,
    )
    return [ref for ref in named if ref is not None]


def _whole(name: str, text: str, before: int) -> int:
    if not (text := text.strip()):
        return before
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 11 else -1
    if not 0 <= value <= MOST[name]:
        raise Unfit(f"{name}: found {text[:20]!r}; allowed: a whole number from 0 to {MOST[name]}")
    return value


def _minutes(text: str, before: float) -> float:
    if not (text := text.strip()):
        return before
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST["minutes"]:
        raise Unfit(f"minutes: found {text[:20]!r}; allowed: a number from 0 (no limit) to {MOST['minutes']}")
    return value
