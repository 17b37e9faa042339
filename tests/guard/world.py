"""Attempts from request to reward: the rollout service against the stand-in, then the graders, then the score."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from services.reward.jobs import Item, Job
from services.reward.score import score
from services.rollout.config import RolloutSettings
from shared import bus as buses
from shared import objects as stores
from shared.bus import Bus
from shared.contracts import topics
from shared.contracts.graded import Graded
from shared.contracts.messages import RolloutFailed, RolloutFinished, RolloutRequested
from shared.contracts.run import LengthPenalty, RewardConfig, RunConfig
from shared.contracts.trajectory import Trajectory, unpack
from shared.objects import Objects
from shared.problems.pack import write
from shared.sandbox.pool import FunctionPool
from shared.telemetry import Health
from shared.weights.checkpoint_objects import upload_directory
from tests.guard import entry
from tests.guard.compact import Writer, write_checkpoint
from tests.guard.problems import Pair
from tests.guard.requests import DENSE, MOE, Packs, draw
from tests.guard.stand_in import StandIn, stand_ins

NAME = "guard"  # of the worker and of the grader: both are stored
JOB = 40  # attempts that are graded together
REWARDS = (
    RewardConfig(id="default"),
    RewardConfig(
        id="all",
        solved=2.0,
        length=LengthPenalty(weight=0.1, k=0.5, q=0.7, per_turn=0.3, apply="all"),
        behaviour={"broken_tool_call": -0.1, "no_submit": -0.2, "untested_submit": -0.3, "thoughts_in_comments": -0.05},
        behaviour_apply="all",
    ),
)


class Lost(AssertionError):
    """Attempts ended by infrastructure; the text says which and why. They have no place in a digest."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that became of one attempt. `stored` and `routing`: the objects' bytes; `routing` is None for the dense run."""

    request: RolloutRequested
    finished: RolloutFinished
    stored: bytes
    routing: bytes | None
    graded: Graded
    rewards: tuple[tuple[float, dict[str, float]], ...]  # by REWARDS

    @property
    def trajectory(self) -> Trajectory:
        return unpack(self.stored)


def play(
    state: Path,
    pairs: Sequence[Pair],
    count: int,
    seed: int,
    *,
    context: int,
    tokenizer: Path | None = None,
    concurrency: int = 48,
) -> list[Outcome]:
    """Play `count` attempts at `pairs` below the empty directory `state`. Return their outcomes, sorted by attempt.

    `tokenizer`: of the checkpoints; None means the plain one. `concurrency`: attempts that the worker holds at a time; no
    outcome depends on it. Raises Lost.
    """
    objects = stores.connect(f"file:{state / 'objects'}")
    functions = entry.sandboxes()
    try:
        packs = Packs(
            public=objects.put("pack", write([problem for problem, _ in pairs])),
            hidden=objects.put("pack-hidden", write([hidden for _, hidden in pairs])),
        )
        for run in (DENSE, MOE):
            write_checkpoint(state / run, tokenizer, context, moe=run == MOE)
            base = upload_directory(objects, f"base-{run}", state / run)
            config = RunConfig(run=run, base=base, pack=packs.public, pack_hidden=packs.hidden)
            objects.put(f"runs/{run}/config.json", msgspec.json.encode(config))
        requests = draw(pairs, packs, count, seed, context)
        writer = Writer(state / DENSE / "tokenizer.json")
        engines = stand_ins(writer, {problem.id: (problem, hidden) for problem, hidden in pairs}, requests, seed)
        settings = RolloutSettings(state=state, name=NAME, rollout_drain_s=5.0, rollout_concurrency=concurrency)
        finished = asyncio.run(roll_out(settings, objects, functions, engines, requests))
        return assess(objects, functions, requests, finished)
    finally:
        functions.close_sync()


async def roll_out(
    config: RolloutSettings,
    objects: Objects,
    functions: FunctionPool,
    engines: Sequence[StandIn],
    requests: list[RolloutRequested],
) -> dict[str, RolloutFinished]:
    """The last message of each attempt. Raises Lost."""
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine.running())
        bus, worker_bus = (buses.connect(config.bus_url, client=client) for client in ("test", NAME))
        stack.push_async_callback(bus.close)
        stack.push_async_callback(worker_bus.close)
        health = await stack.enter_async_context(Health("rollout", config))
        for engine in engines:
            await bus.publish(topics.POLICIES_APPLIED, engine.name, engine.applied())
        serving = asyncio.create_task(entry.rollout_service(config, worker_bus, objects, functions, health, stop))
        try:
            await asyncio.gather(*(bus.publish(topics.ROLLOUTS_REQUESTED, one.key.attempt, one) for one in requests))
            return await _ends(bus, len(requests), serving)
        finally:
            stop.set()
            await serving


async def _ends(bus: Bus, count: int, serving: asyncio.Task[None]) -> dict[str, RolloutFinished]:
    found: dict[str, RolloutFinished] = {}
    lost: list[RolloutFailed] = []
    async with asyncio.timeout(60 + count):
        async for delivery in bus.deliveries([topics.ROLLOUTS_FINISHED], None, 64):
            delivery.done()
            message = delivery.message
            if isinstance(message, RolloutFinished):
                found[message.key.attempt] = message
            else:
                lost.append(message)
            if len(found) + len(lost) == count:
                break
    if lost:
        named = "\n".join(f"{one.key.attempt} ({one.key.problem}): {one.reason}" for one in lost[:8])
        raise Lost(f"{len(lost)} of {count} attempts ended by infrastructure:\n{named}")
    return found


def assess(
    objects: Objects, functions: FunctionPool, requests: list[RolloutRequested], finished: dict[str, RolloutFinished]
) -> list[Outcome]:
    """Grade in jobs of JOB, score under each of REWARDS. Raises Lost."""
    outcomes: list[Outcome] = []
    ordered = sorted(requests, key=lambda request: request.key.attempt)
    for start in range(0, len(ordered), JOB):
        chunk = ordered[start : start + JOB]
        items = [
            Item(
                run=one.run, key=one.key, trajectory=finished[one.key.attempt].trajectory,
                pack=one.pack, pack_hidden=one.pack_hidden,
            )
            for one in chunk
        ]  # fmt: skip
        answer = entry.grade(objects, functions, NAME, Job(answer_key=f"grading/{start}", items=items))
        for request, graded in zip(chunk, answer.results, strict=True):
            if isinstance(graded, str):
                raise Lost(f"{request.key.attempt} ({request.key.problem}): not graded: {graded}")
            outcomes.append(_outcome(objects, request, finished[request.key.attempt], graded))
    return outcomes


def _outcome(objects: Objects, request: RolloutRequested, finished: RolloutFinished, graded: Graded) -> Outcome:
    stored = objects.get(finished.trajectory)
    routing = unpack(stored).routing
    return Outcome(
        request=request,
        finished=finished,
        stored=stored,
        routing=None if routing is None else objects.get(routing),
        graded=graded,
        rewards=tuple(score(config, graded.verdict, finished.effort, graded.findings) for config in REWARDS),
    )
