"""One attempt from claim to result: what is held in memory, and what becomes of it in the object store and on the bus."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from services.rollout.agent import Agent
from services.rollout.keeping import Keeper
from services.rollout.recorder import Recorder
from shared.contracts.ids import attempt_prefix
from shared.contracts.messages import Effort, RolloutFinished, RolloutRequested, StopReason
from shared.contracts.run import Purpose, Ref
from shared.contracts.trajectory import Submission, Trajectory, pack, pack_routing
from shared.objects import Objects
from shared.sandbox.contract import Decision


class AnyAgent(Protocol):
    """An attempt's agent, of ours or of others, and what was recorded of it. `deadline`: set before its task is cancelled where the
    work is to be submitted as it is."""

    deadline: bool

    @property
    def recorder(self) -> Recorder: ...

    @property
    def effort(self) -> Effort: ...

    async def run(self) -> StopReason:
        """Return why the attempt ended. Raises InfrastructureError."""


@dataclass(slots=True)
class Held:
    """An attempt in hand. `dropped`: its outcome is no longer wanted (its run was stopped, or a newer epoch has begun)."""

    request: RolloutRequested
    agent: AnyAgent | None = None
    running: asyncio.Task[Any] | None = None
    dropped: bool = False
    late: bool = False  # told to submit, perhaps before the agent had begun
    over: bool = False  # the agent has ended: the work is being collected
    leaving: bool = False  # the worker leaves: the attempt ends with a checkpoint as soon as one can be made
    keeper: Keeper | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def epoch(self) -> int:
        return self.request.key.epoch

    @property
    def oldest_version(self) -> int:
        return self.agent.recorder.oldest_version if self.agent is not None else -1

    def submit(self) -> None:
        """End now, the work as it is. What the engine has sampled of the turn is recorded."""
        self.late = True
        if self.agent is not None and self.running is not None and not self.over and not self.agent.deadline:
            self.agent.deadline = True
            self.running.cancel()

    def leave(self) -> None:
        """End with a checkpoint: at once while a generation is sampled, else behind the turn."""
        self.leaving = True
        if isinstance(self.agent, Agent) and self.running is not None and self.agent.sampling_now:
            self.running.cancel()

    def drop(self) -> None:
        self.dropped = True
        if self.agent is not None:
            self.agent.deadline = False  # a drop after a submit: nothing is submitted
        if self.running is not None:
            self.running.cancel()


class Occupied:
    """A place in the worker that an attempt has, from its request on. `free`: the places of the worker."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free, self._taken = free, True

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Another attempt may have the place meanwhile; then this one waits for the next that is free. One that fails here
        needs none any more."""
        self.leave()
        yield
        await self._free.acquire()
        self._taken = True

    def leave(self, _: object = None) -> None:
        if self._taken:
            self._taken = False
            self._free.release()


@dataclass(frozen=True, slots=True)
class Work:
    """What an attempt left. `notes`: for people and for behaviour terms, in the trajectory. `decisions`: its requests to the
    network."""

    stop: StopReason
    submission: Submission
    notes: dict[str, str]
    decisions: Sequence[Decision] = ()


def trajectory_of(request: RolloutRequested, agent: AnyAgent, work: Work) -> Trajectory:
    return Trajectory(
        key=request.key,
        stop=work.stop,
        temperature=request.sampling.temperature,
        effort=agent.effort,
        segments=agent.recorder.segments(),
        files=work.submission.files,
        # Graded apart from the final state, in evaluations only: the share of problems that the first edit alone solves.
        first_edit_files=work.submission.first_edit_files if request.key.purpose is Purpose.evaluate else None,
        changes=work.submission.changes,
        steps=work.submission.steps,
        notes=work.notes,
        decisions=list(work.decisions),
    )


def store(objects: Objects, request: RolloutRequested, agent: AnyAgent, work: Work) -> Ref:
    """Puts routing and trajectory below the prefix of this epoch. The name carries the content's hash: should two workers
    hold the same epoch after a crash, neither overwrites what the other one's message refers to."""
    trajectory = trajectory_of(request, agent, work)
    prefix = attempt_prefix(request.run, request.key.attempt, request.key.epoch)
    if (rows := agent.recorder.routing()) is not None:
        data = pack_routing(rows)
        trajectory.routing = objects.put(f"{prefix}/routing-{xxhash.xxh3_64_hexdigest(data)}.safetensors.zst", data)
    data = pack(trajectory)
    return objects.put(f"{prefix}/trajectory-{xxhash.xxh3_64_hexdigest(data)}.safetensors.zst", data)


def finished(
    request: RolloutRequested,
    agent: AnyAgent,
    stop: StopReason,
    trajectory: Ref,
    *,
    worker: str,
    seconds: float,
    grading_s: float,
) -> RolloutFinished:
    return RolloutFinished(
        run=request.run,
        key=request.key,
        stop=stop,
        trajectory=trajectory,
        reward_config=request.reward_config,
        pack=request.pack,
        pack_hidden=request.pack_hidden,
        effort=agent.effort,
        oldest_version=agent.recorder.oldest_version,
        oldest_kv_version=agent.recorder.oldest_kv_version,
        newest_version=agent.recorder.newest_version,
        worker=worker,
        seconds=seconds,
        grading_s=grading_s,
    )
