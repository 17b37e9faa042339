"""Practice in one process: the product's engine, agent, tests, graders' rules, credit and trainer; no bus, store or ledger.

For questions about learning that a run of the whole platform answers too slowly. Attempts of a step are sampled on one
version, so every sample has age 0. Not a benchmark itself: `benchmarks.credit` is one that stands on it, and

    python -m benchmarks.learning.loop --pack DIR [--steps 50] [--retry fresh|append] [--kinds comparison,index,…]

practises as the demo does, without router replay and MTP, and prints development figures (dev split, temperature 1).
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from etude.demo.options import DemoOptions
from etude.demo.prepare import limits, training
from services.inference.engine import Engine as Sampler
from services.inference.request import Request, Result
from services.reward.score import score
from services.rollout.agent import Agent
from services.rollout.generation import Generation
from services.trainer import credit
from services.trainer.base import pack as packs
from services.trainer.engine import Engine
from services.trainer.groups import sequences_of
from services.trainer.packing import TrainSequence
from services.trainer.step import Trainer
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Credit, RewardConfig, Sampling, TrainConfig
from shared.contracts.trajectory import Trajectory
from shared.environments.function import grading
from shared.environments.function.visible_tests import VisibleTests
from shared.environments.function.workspace import FunctionWorkspace
from shared.model import load_checkpoint, published
from shared.problems import FunctionHidden, FunctionProblem
from shared.renderers.formats.compact_1 import Compact
from shared.sandbox import FunctionRun, connect

BASE = Path(__file__).parents[2] / "etude" / "data" / "base"
AT_ONCE = 96  # attempts: the engine's rows
REWARD = RewardConfig(behaviour={})
PROMPT_ROOM = 224  # tokens that a problem leaves for an attempt: the same problems whatever the limits

Pair = tuple[FunctionProblem, FunctionHidden]


@dataclass(frozen=True, slots=True)
class Attempt:
    trajectory: Trajectory
    reward: float
    solved: bool
    first_edit: bool  # solved by it alone


class EngineModel:
    """The engine's thread behind the agent's `Model`."""

    def __init__(self, engine: Sampler, temperature: float, stop_tokens: frozenset[int]) -> None:
        self.engine, self.temperature, self.stop_tokens = engine, temperature, stop_tokens

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Result] = loop.create_future()
        self.engine.submit(
            Request(
                rid="",
                tokens_P=np.array(tokens, np.int32),
                max_new_tokens=max_new_tokens,
                done=lambda result: loop.call_soon_threadsafe(answer.set_result, result),  # type: ignore[arg-type]
                temperature=self.temperature,
                stop_tokens=self.stop_tokens,
                routing_start=first_row,
            )
        )
        result = await answer
        return Generation(
            tokens=result.tokens_C.tolist(),
            logprobs_N=result.logprobs_C,
            versions_N=result.versions_C,
            oldest_kv_version=result.oldest_kv_version,
            experts_RLK=result.routing,
            finish=result.finish.type,
        )


class Practice:
    """A policy, its sampler and its trainer. `close` ends the engine's thread and the sandboxes."""

    def __init__(self, checkpoint: Path, train: TrainConfig, sampling: Sampling | None = None) -> None:
        torch.set_num_threads(1)
        self.sampling, self.train_config = sampling or Sampling(), train
        self.format = Compact.load(checkpoint)
        self.model = load_checkpoint(checkpoint)
        self.engine = Engine(self.model, train)
        self.trainer = Trainer(self.engine, train)
        self.sampler = Sampler(
            copy.deepcopy(self.model), 0, rows=2 * AT_ONCE, positions=512, prefill_tokens=512, queue_limit=1 << 20
        )
        self.sampler.start()
        self.functions = connect("bubblewrap", workers=2)
        self.step = 0
        self.lots = random.Random(0)

    def close(self) -> None:
        self.sampler.stop()
        self.functions.close_sync()

    def problems(self, pack: Path, split: str, kinds: frozenset[str] = frozenset()) -> list[Pair]:
        """In a fixed random order. `kinds` of bugs; empty: all."""
        known = packs.problems(pack, split)
        pairs = [p for p in known if self.format.fits(p[0], PROMPT_ROOM) and (not kinds or p[1].bug in kinds)]
        random.Random(0).shuffle(pairs)
        return pairs

    def sync(self) -> None:
        """The sampler takes on what the trainer's forward computes with, and forgets what older weights computed."""
        with published(self.model):
            model = copy.deepcopy(self.model)
        self.sampler.swap(model, self.step).result()
        self.sampler.flush().result()

    def attempts(self, pairs: Sequence[Pair], each: int) -> list[list[Attempt]]:
        """Groups of `each` attempts."""
        ended = asyncio.run(self._attempt_all([problem for problem, _ in pairs for _ in range(each)]))
        flat = [pair for pair in pairs for _ in range(each)]
        whole = self._grade(flat, [t.files for t in ended])
        first = self._grade(flat, [t.first_edit_files or p.files for t, (p, _) in zip(ended, flat, strict=True)])
        scored = [
            Attempt(t, score(REWARD, verdict, t.effort, {})[0], verdict.solved, alone.solved)
            for t, verdict, alone in zip(ended, whole, first, strict=True)
        ]
        return [scored[i : i + each] for i in range(0, len(scored), each)]

    def sequences(self, groups: Sequence[Sequence[Attempt]], how: Credit) -> list[TrainSequence]:
        found: list[TrainSequence] = []
        for number, group in enumerate(groups):
            trajectories = [a.trajectory for a in group]
            lengths = [REWARD.length if a.solved else None for a in group]
            shares = credit.assign(
                trajectories, [a.reward for a in group], how, lot=self.lots.random(), lengths=lengths
            )
            for trajectory, share in zip(trajectories, shares, strict=True):
                own = sequences_of(trajectory, None, share, self.model.config)
                found += [replace(sequence, group=number) for sequence in own]
        return found

    def practise(self, pairs: Sequence[Pair], each: int, progress: float = 0.0) -> tuple[float, dict[str, float]]:
        """One step; the share of solved attempts, and the trainer's metrics. `progress`: of the practice, for cool-down."""
        self.sync()
        groups = self.attempts(pairs, each)
        self.step += 1
        sequences = self.sequences(groups, self.train_config.credit)
        trained = self.trainer.train(sequences, len(pairs) * each, self.step, progress=progress)
        return float(np.mean([a.solved for g in groups for a in g])), trained.metrics

    def figures(self, pairs: Sequence[Pair], each: int) -> dict[str, float]:
        self.sync()
        groups = self.attempts(pairs, each)
        solved = np.array([[a.solved for a in g] for g in groups], float)
        first = np.array([[a.first_edit for a in g] for g in groups], float)
        shares = {"pass_at_1": solved.mean(), "first_edit": first.mean(), f"best_of_{each}": solved.max(1).mean()}
        return {name: round(float(share), 4) for name, share in shares.items()}

    async def _attempt_all(self, problems: Sequence[FunctionProblem]) -> list[Trajectory]:
        model = EngineModel(self.sampler, self.sampling.temperature, frozenset(self.format.stop_tokens))
        tests = VisibleTests(self.functions)
        room = asyncio.Semaphore(AT_ONCE)

        async def attempt(index: int, problem: FunctionProblem) -> Trajectory:
            async with room:
                workspace = FunctionWorkspace(problem, self.sampling, tests)
                agent = Agent(self.format, model, workspace, self.sampling)
                stop = await agent.run()
                work = await workspace.submission()
            return Trajectory(
                key=AttemptKey(attempt=str(index), epoch=0, group="", problem=problem.id, index=index),
                stop=stop,
                temperature=self.sampling.temperature,
                effort=agent.effort,
                segments=agent.recorder.segments(),
                files=work.files,
                first_edit_files=work.first_edit_files,
            )

        return list(await asyncio.gather(*(attempt(i, p) for i, p in enumerate(problems))))

    def _grade(self, pairs: Sequence[Pair], states: Sequence[dict[str, str]]) -> list:
        distinct: dict[tuple[str, str], tuple[Pair, FunctionRun]] = {}
        keys = []
        for (problem, hidden), files in zip(pairs, states, strict=True):
            keys.append(key := (problem.id, repr(sorted(files.items()))))
            distinct.setdefault(key, ((problem, hidden), grading.run_of(problem, hidden, files)))
        results = self.functions.run_sync([run for _, run in distinct.values()])
        verdicts = {
            key: grading.judge(*pair, result)
            for (key, (pair, _)), result in zip(distinct.items(), results, strict=True)
        }
        return [verdicts[key] for key in keys]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, required=True, help="what `etude tasks mutate --out DIR` made")
    parser.add_argument("--checkpoint", type=Path, default=BASE)
    parser.add_argument("--steps", type=int, default=50, help="of 16 groups of 8 attempts")
    parser.add_argument("--every", type=int, default=50, help="steps between development figures")
    parser.add_argument("--credit", choices=("turn", "attempt"), default="turn")
    parser.add_argument("--kinds", default="", help="kinds of bugs to practise on, with commas; empty: all")
    parser.add_argument("--retry", choices=("fresh", "append"), default="fresh", help="what is read after a failure")
    parser.add_argument("--learning-rate", type=float, default=training(DemoOptions()).learning_rate)
    parser.add_argument("--edits", type=int, default=Sampling().max_edits)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    train = msgspec.structs.replace(
        training(DemoOptions(credit=options.credit, router_replay=False)),
        learning_rate=options.learning_rate,
        mtp=False,
    )
    sampling = msgspec.structs.replace(limits(options.retry), max_edits=options.edits)
    practice = Practice(options.checkpoint, train, sampling)
    dev = practice.problems(options.pack, "dev")
    pool = practice.problems(options.pack, "rl", frozenset(filter(None, options.kinds.split(","))))
    random.Random(options.seed).shuffle(pool)
    print(f"step 0: {practice.figures(dev, 4)}", flush=True)
    for step in range(1, options.steps + 1):
        drawn = [pool[(step * 16 + i) % len(pool)] for i in range(16)]
        solved, metrics = practice.practise(drawn, 8, (step - 1) / options.steps)
        print(f"step {step}: solved {solved:.3f}, entropy {metrics['entropy']:.2f}", flush=True)
        if step % options.every == 0:
            print(f"step {step}: {practice.figures(dev, 4)}", flush=True)
    practice.close()


if __name__ == "__main__":
    main()
