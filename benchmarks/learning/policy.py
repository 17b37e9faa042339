"""A policy that practises on generated repositories: the product's agent, engine, grader and trainer in one process.

All attempts of a step are sampled on one version, so every sample has age 0.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.learning.loop import EngineModel
from benchmarks.learning.repositories import Task
from benchmarks.learning.scripted import MemoryWorkspace, trace
from services.inference.engine import Engine as Sampler
from services.reward.score import score
from services.rollout.agent import Agent
from services.rollout.generation import Generation
from services.trainer import credit
from services.trainer.engine import Engine
from services.trainer.groups import sequences_of
from services.trainer.packing import TrainSequence
from services.trainer.step import Trained, Trainer
from shared.contracts.messages import AttemptKey, StopReason, Verdict
from shared.contracts.run import Credit, RewardConfig, Sampling, TrainConfig
from shared.contracts.trajectory import Submission, Trajectory
from shared.environments import Grading, Places, Ungradable, Workspace
from shared.environments.repository import RepositoryEnvironment
from shared.model import load_checkpoint, published
from shared.objects import Objects
from shared.renderers.formats.chatml import ChatML
from shared.sandbox import connect_sandboxes

REWARD = RewardConfig(id="solved", length=None, behaviour={})
# A scripted token counts as one that a sampler would hardly have said. Its importance weight is then cut to exactly
# `importance_clip`, which SFT sets to 1: with advantage 1 the product's loss is the negative log-likelihood.
UNSAID = -60.0


@dataclass(frozen=True, slots=True)
class Attempt:
    trajectory: Trajectory
    solved: bool
    reward: float


class Clock:
    """Seconds by activity: data, sampling, tools, grading, training."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds = dict(seconds or {})

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def shares(self) -> dict[str, float]:
        whole = sum(self.seconds.values()) or 1.0
        return {name: round(seconds / whole, 4) for name, seconds in sorted(self.seconds.items())}


class _Clocked:
    """For how long at least one generation was under way, and how many tokens were sampled."""

    def __init__(self) -> None:
        self.busy_s, self.tokens = 0.0, 0
        self._running, self._since = 0, 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of a generation, once for all that run together."""
        if not self._running:
            self._since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self.busy_s += time.perf_counter() - self._since


@dataclass(frozen=True, slots=True)
class _Timed:
    """A model whose generations are noted."""

    model: EngineModel
    clock: _Clocked

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        with self.clock.running():
            found = await self.model.generate(tokens, max_new_tokens=max_new_tokens, first_row=first_row)
        self.clock.tokens += len(found.tokens)
        return found


class Policy:
    """A checkpoint in practice. `sandbox`: tools run in a real sandbox for each attempt; False: on files in memory.
    `at_once`: attempts at a time. `threads`: of the trainer. `samplers`: engines, each with a thread, a copy of the weights and
    attempts of its own; a compiled step uses one core. `close` ends their threads."""

    def __init__(
        self,
        checkpoint: Path,
        config: TrainConfig,
        objects: Objects,
        cache: Path,
        *,
        sandbox: bool = True,
        at_once: int = 16,
        positions: int = 1024,
        threads: int = 1,
        samplers: int = 1,
    ) -> None:
        torch.set_num_threads(threads)
        self.config, self.at_once, self.positions, self.sandbox = config, at_once, positions, sandbox
        self.format = ChatML.load(checkpoint)
        self.model = load_checkpoint(checkpoint)
        self.engine = Engine(self.model, config)
        self.trainer = Trainer(self.engine, config)
        self._sandboxes = connect_sandboxes("bubblewrap")
        self.environment = RepositoryEnvironment(Places(sandboxes=self._sandboxes, objects=objects, cache=cache))
        self.clock = Clock()
        self.sampled_tokens = self.trained_tokens = 0
        self._samplers: list[Sampler] = []
        self._wanted_samplers = samplers
        self._version = 0
        self._verdicts: dict[tuple[str, str], bool] = {}

    def close(self) -> None:
        for sampler in self._samplers:
            sampler.stop()
        self._samplers = []
        asyncio.run(self._sandboxes.close())

    # Sampling and grading

    def attempts(self, tasks: Sequence[Task], each: int, temperature: float) -> list[list[Attempt]]:
        """Return groups of `each` graded attempts, sampled on the policy as it is."""
        samplers = self._synced()
        began = time.perf_counter()
        stop_tokens = frozenset(self.format.stop_tokens)
        clock = _Clocked()
        models = [_Timed(EngineModel(sampler, temperature, stop_tokens), clock) for sampler in samplers]
        flat = [task for task in tasks for _ in range(each)]
        ended = asyncio.run(self._all(flat, each, models, temperature))
        self.clock.add("sampling", clock.busy_s)
        self.clock.add("tools", time.perf_counter() - began - clock.busy_s)
        self.sampled_tokens += clock.tokens
        began = time.perf_counter()
        solved = self._grade(flat, ended)
        self.clock.add("grading", time.perf_counter() - began)
        found = [Attempt(t, s, _reward(t, s)) for t, s in zip(ended, solved, strict=True)]
        return [found[i : i + each] for i in range(0, len(found), each)]

    def _synced(self) -> list[Sampler]:
        """Return the samplers with the weights that the trainer's forward computes with. Older cache entries are dropped."""
        began = time.perf_counter()
        with published(self.model):
            models = [copy.deepcopy(self.model) for _ in range(self._wanted_samplers)]
        if not self._samplers:
            rows = 2 * self.at_once
            for model in models:
                sampler = Sampler(
                    model, self._version, rows=rows, positions=self.positions, prefill_tokens=512, queue_limit=1 << 20
                )
                sampler.start()
                self._samplers.append(sampler)
        else:
            self._version += 1
            for sampler, model in zip(self._samplers, models, strict=True):
                sampler.swap(model, self._version).result()
                sampler.flush().result()
        self.clock.add("sampling", time.perf_counter() - began)
        return self._samplers

    async def _all(
        self, tasks: Sequence[Task], each: int, models: Sequence[_Timed], temperature: float
    ) -> list[Trajectory]:
        """Run one attempt at each task. The `each` attempts of a group go to one model, which computes their prompt once."""
        room = asyncio.Semaphore(self.at_once)

        async def attempt(index: int, task: Task) -> Trajectory:
            async with room, self._opened(task) as workspace:
                model = models[index // each % len(models)]
                agent = Agent(self.format, model, workspace, Sampling(temperature=temperature))
                stop = await agent.run()
                return _trajectory(index, task, agent, stop, await workspace.submission(), temperature)

        return list(await asyncio.gather(*(attempt(i, task) for i, task in enumerate(tasks))))

    @asynccontextmanager
    async def _opened(self, task: Task) -> AsyncIterator[Workspace]:
        workspace: Workspace
        if self.sandbox:
            workspace = await self.environment.open(task.problem, Sampling())
        else:
            workspace = MemoryWorkspace(task)
        try:
            yield workspace
        finally:
            await workspace.close()

    def _grade(self, tasks: Sequence[Task], ended: Sequence[Trajectory]) -> list[bool]:
        """Grade each distinct submission once. One without changes is unsolved: a test fails on the tree as it is given."""
        keys = [(task.problem.id, repr(sorted(t.changes.items()))) for task, t in zip(tasks, ended, strict=True)]
        fresh: dict[tuple[str, str], Grading] = {}
        for key, task, trajectory in zip(keys, tasks, ended, strict=True):
            if not trajectory.changes:
                self._verdicts[key] = False
            elif key not in self._verdicts:
                fresh[key] = Grading(task.problem, task.hidden, Submission(changes=trajectory.changes))
        verdicts = asyncio.run(self.environment.grade(list(fresh.values())))
        for key, verdict in zip(fresh, verdicts, strict=True):
            if isinstance(verdict, Ungradable):
                raise RuntimeError(f"{key[0]}: the grader failed: {verdict.reason}")
            self._verdicts[key] = verdict.solved
        return [self._verdicts[key] for key in keys]

    # Training

    def sft(self, tasks: Sequence[Task], step: int, progress: float) -> Trained:
        """One update on scripted traces. Step counts from 1; `progress`: of the stage, 0 to 1."""
        began = time.perf_counter()
        sequences = []
        for number, task in enumerate(tasks):
            segment = trace(task, self.format)
            sampled_T = segment.loss_mask
            sequences.append(
                TrainSequence(
                    group=number,
                    tokens_T=segment.tokens,
                    sampled_T=sampled_T,
                    logprobs_T=np.where(sampled_T, UNSAID, 0.0).astype(np.float32),
                    versions_T=segment.versions,
                    advantages_T=sampled_T.astype(np.float32),
                    temperature=1.0,
                    experts_TLK=None,
                )
            )
        self.clock.add("data", time.perf_counter() - began)
        return self._train(sequences, len(tasks), step, progress)

    def rl(self, tasks: Sequence[Task], each: int, step: int, progress: float) -> tuple[list[list[Attempt]], Trained]:
        """One update on groups of attempts that this policy has just sampled."""
        groups = self.attempts(tasks, each, 1.0)
        sequences: list[TrainSequence] = []
        for number, group in enumerate(groups):
            trajectories = [a.trajectory for a in group]
            shares = credit.assign(trajectories, [a.reward for a in group], Credit(per="attempt"), lot=0.0)
            for trajectory, share in zip(trajectories, shares, strict=True):
                own = sequences_of(trajectory, None, share, self.model.config)
                sequences += [replace(sequence, group=number) for sequence in own]
        return groups, self._train(sequences, len(tasks) * each, step, progress)

    def _train(self, sequences: Sequence[TrainSequence], attempts: int, step: int, progress: float) -> Trained:
        began = time.perf_counter()
        trained = self.trainer.train(sequences, attempts, step, progress=progress)
        self.clock.add("training", time.perf_counter() - began)
        self.trained_tokens += int(trained.metrics["tokens_fed"])
        return trained


def _reward(trajectory: Trajectory, solved: bool) -> float:
    return score(REWARD, Verdict(solved=solved, passed=int(solved), total=1), trajectory.effort, {})[0]


def _trajectory(
    index: int, task: Task, agent: Agent, stop: StopReason, work: Submission, temperature: float
) -> Trajectory:
    return Trajectory(
        key=AttemptKey(attempt=str(index), epoch=0, group="", problem=task.problem.id, index=index),
        stop=stop,
        temperature=temperature,
        effort=agent.effort,
        segments=agent.recorder.segments(),
        files=work.files,
        changes=work.changes,
    )
