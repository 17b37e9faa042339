"""Whether attempts that lose their workers end as long as others do, in simulated time.

Every worker dies each KILL_EVERY_S; an attempt is then lost until its lease is over, and asked for again as
services.scheduler.reconciler decides. `resume`: from its newest checkpoint. Without: from its task, as before there were any.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attempts.world import Talk, World, rng_of
from services.scheduler.reconciler import FIRST_DELAY_S, Fate, fate
from services.scheduler.records import Attempt
from shared.contracts.run import Sampling, ScheduleConfig
from shared.ledger.transitions import AttemptState
from shared.problems import FunctionProblem
from shared.renderers.registry import load_renderer
from tests.guard.compact import Writer, write_checkpoint
from tests.guard.problems import fixed

KILL_EVERY_S = 30.0
TURN_S = (2.0, 6.0)
ENDS = 0.05  # of turns: 20 turns an attempt
SAMPLING = Sampling(retry="append", max_turns=400, max_edits=400, max_completion_tokens=100_000, max_repeats=0)


class Killed(BaseException):
    """The worker is gone: nothing of its process runs any more."""


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def policy(writer: Writer, problem: FunctionProblem):  # type: ignore[no-untyped-def]
    """Change a line and take it back, in turn, each time with a test, until a draw says that it submits."""
    (text,) = problem.files.values()
    last = len(text.rstrip("\n").split("\n")) - 1
    before = text.rstrip("\n").split("\n")[-1].strip()
    edit = writer.change(last, before, before + " or 0")

    def say(context: list[int], room: int, rng: random.Random) -> tuple[list[int], str]:
        if rng.random() < ENDS:
            tokens = [writer.ids["submit"]]
        elif writer.ids["edit"] in context and _edited(context, writer):
            tokens = [writer.ids["undo"], writer.ids["test"]]
        else:
            tokens = [*edit, writer.ids["test"]]
        return tokens[:room], "stop" if len(tokens) <= room else "length"

    return say


def _edited(context: list[int], writer: Writer) -> bool:
    return context.count(writer.ids["edit"]) > context.count(writer.ids["undo"])


async def attempt(
    world: World, problem: FunctionProblem, name: str, *, kills: bool, resume: bool, every_s: float
) -> int | None:
    """Return the turns of a finished attempt; None: it was lost for good."""
    rng, clock = rng_of(name, kills, resume), Clock()
    clock.now = rng.uniform(0, KILL_EVERY_S)
    ledger = Attempt(name, "g", 0, 0, AttemptState.claimed, 0, 0.0, 0.0)
    schedule = ScheduleConfig()
    while True:
        request = world.request(name, SAMPLING, epoch=ledger.epoch, checkpoint=ledger.checkpoint)
        keeper = world.keeper(request, every_s if resume else math.inf, clock)
        dies = (math.floor(clock.now / KILL_EVERY_S) + 1) * KILL_EVERY_S if kills else math.inf

        def turn(_: int, dies: float = dies) -> None:
            clock.now += rng.uniform(*TURN_S)
            if clock.now > dies:
                raise Killed

        talk = Talk(world.policy, (name, ledger.epoch), before=turn)
        agent = await world.begun(keeper, talk, problem)
        try:
            await keeper.run(agent, talk, lambda: False)  # type: ignore[arg-type]
            await keeper.forget()
            return agent.effort.turns
        except Killed:
            told = world.announced.get(name)
            if told is not None:
                ledger.kept(told.checkpoint, told.oldest_version)
            if fate(ledger.fruitless, math.inf, schedule.replacements) is Fate.fail:
                return None
            clock.now = dies + schedule.lease_s + FIRST_DELAY_S * 2**ledger.fruitless
            ledger.epoch += 1


async def _played(world: World, count: int, name: str, **how: bool | float) -> list[int]:
    problem = fixed()[0][0]
    found = [await attempt(world, problem, f"{name}-{i}", **how) for i in range(count)]  # type: ignore[arg-type]
    return [turns for turns in found if turns is not None]


def played(folder: Path, count: int, name: str, *, kills: bool, resume: bool = True, every_s: float = 5.0) -> list[int]:
    """Return the turns of those of `count` attempts that finish. `folder`: an empty one, for the chat format."""
    write_checkpoint(folder / name, None, 8192, moe=False)
    writer = Writer(folder / name / "tokenizer.json")
    world = World(load_renderer(folder / name), policy(writer, fixed()[0][0]))
    return asyncio.run(_played(world, count, name, kills=kills, resume=resume, every_s=every_s))


def ks_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test (asymptotic, Numerical Recipes 14.3.3)."""
    merged = sorted(set(a) | set(b))
    first, second = sorted(a), sorted(b)
    i = j = 0
    most = 0.0
    for value in merged:
        while i < len(first) and first[i] <= value:
            i += 1
        while j < len(second) and second[j] <= value:
            j += 1
        most = max(most, abs(i / len(first) - j / len(second)))
    n = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    x = (n + 0.12 + 0.11 / n) * most
    if x < 0.2:
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))))
