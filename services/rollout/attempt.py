"""One attempt from claim to result: what is held in memory, and what becomes of it in the object store and on the bus."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import xxhash

from services.rollout.agent import Agent
from shared.contracts.ids import attempt_prefix
from shared.contracts.messages import RolloutFinished, RolloutRequested, StopReason
from shared.contracts.run import Purpose, Ref
from shared.contracts.trajectory import Trajectory, pack, pack_routing
from shared.objects import Objects


@dataclass(slots=True)
class Held:
    """An attempt in hand. `dropped`: its outcome is no longer wanted (its run was stopped, or a newer epoch has begun)."""

    request: RolloutRequested
    agent: Agent | None = None
    running: asyncio.Task[StopReason] | None = None
    dropped: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def epoch(self) -> int:
        return self.request.key.epoch

    @property
    def oldest_version(self) -> int:
        return self.agent.recorder.oldest_version if self.agent is not None else -1

    def submit(self) -> None:
        """End now, the work as it is. What the engine is sampling at this moment is lost, and not recorded."""
        if self.agent is not None and self.running is not None and not self.running.done():
            self.agent.deadline = True
            self.running.cancel()

    def drop(self) -> None:
        self.dropped = True
        if self.running is not None:
            self.running.cancel()


def trajectory_of(request: RolloutRequested, agent: Agent, stop: StopReason, notes: dict[str, str]) -> Trajectory:
    return Trajectory(
        key=request.key,
        stop=stop,
        temperature=request.sampling.temperature,
        effort=agent.effort,
        segments=agent.recorder.segments(),
        files=agent.workspace.files,
        # Graded apart from the final state, in evaluations only: the share of problems that the first edit alone solves.
        first_edit_files=agent.first_edit if request.key.purpose is Purpose.evaluate else None,
        notes=notes,
    )


def store(objects: Objects, request: RolloutRequested, agent: Agent, stop: StopReason, notes: dict[str, str]) -> Ref:
    """Puts routing and trajectory below the prefix of this epoch. The name carries the content's hash: should two workers
    hold the same epoch after a crash, neither overwrites what the other one's message refers to."""
    trajectory = trajectory_of(request, agent, stop, notes)
    prefix = attempt_prefix(request.run, request.key.attempt, request.key.epoch)
    if (rows := agent.recorder.routing()) is not None:
        data = pack_routing(rows)
        trajectory.routing = objects.put(f"{prefix}/routing-{xxhash.xxh3_64_hexdigest(data)}.safetensors.zst", data)
    data = pack(trajectory)
    return objects.put(f"{prefix}/trajectory-{xxhash.xxh3_64_hexdigest(data)}.safetensors.zst", data)


def finished(
    request: RolloutRequested, agent: Agent, stop: StopReason, trajectory: Ref, *, worker: str, seconds: float
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
    )
