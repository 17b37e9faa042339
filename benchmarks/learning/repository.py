"""Does a model learn to repair repositories? SFT on scripted traces, then RL; solve rates on held-out problems.

python -m benchmarks.learning.repository --resume DIR [--model smollm|small] [--minutes M] [--sitting M] [--json FILE]

DIR holds the whole state; the same command goes on where a sitting ended or was killed. `--minutes`: of practice, all stages
together; evaluations come on top. `--sitting`: stop after so many minutes, to go on later. `--quick`: the machinery alone, on a
tiny model of random weights. `smollm` is SmolLM2-135M-Instruct (`make smollm`); `small` is a model of 5.0M parameters
that the base recipe makes first (`benchmarks.learning.small`).

Problems: `benchmarks.learning.repositories`. An issue is solved when the environment's grader says so (pytest in a
sandbox). Intervals are bootstraps over problems; a gain compares the same problems before and after.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import records
from benchmarks.learning import small
from benchmarks.learning.policy import Policy
from benchmarks.learning.report import plot, to_records
from benchmarks.learning.repositories import Task, generate
from benchmarks.learning.small import SittingOver
from shared.contracts.run import TrainConfig
from shared.model import save_checkpoint
from shared.objects import connect
from shared.output import write_whole

SMOLLM = Path(".cache/smollm")
EVALUATIONS = ("before_sft", "after_sft", "after_rl")
SFT_SEED, RL_SEED, HELD_OUT_SEED = 10_000, 1_000_000, 1  # of the generator: no stage meets another's problems
SAVE_EVERY_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of one run. `shares`: of the minutes, by stage. `held_out`: problems; each is tried once greedily, and `samples`
    times at temperature 1. `traces`: that pretraining
    reads, for each minute of the run."""

    shares: dict[str, float]
    sft_rate: float
    rl_rate: float
    traces_per_step: int
    groups: int
    group_size: int
    held_out: int
    samples: int
    at_once: int
    micro_batch_tokens: int
    traces: int = 0
    shape: dict[str, Any] = field(default_factory=dict)
    vocabulary: int = 0
    texts: int = 0


PLANS = {
    "smollm": Plan({"sft": 0.6, "rl": 0.4}, 2e-4, 2e-5, 8, 6, 6, held_out=60, samples=2, at_once=12, micro_batch_tokens=2048),
    "small": Plan(
        {"pretrain": 0.7, "sft": 0.1, "rl": 0.2}, 1e-3, 1e-4, 16, 8, 8, held_out=100, samples=4, at_once=64,
        micro_batch_tokens=4096, traces=80, shape=small.MODEL, vocabulary=small.VOCABULARY, texts=small.TEXTS,
    ),
    "tiny": Plan(
        {"pretrain": 0.4, "sft": 0.3, "rl": 0.3}, 1e-3, 1e-4, 2, 2, 2, held_out=3, samples=2, at_once=8,
        micro_batch_tokens=2048, traces=160, vocabulary=768, texts=8,
        shape={**small.MODEL, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16},
    ),
}  # fmt: skip


@dataclass(slots=True)
class State:
    """What a folder knows. `seconds`: by stage and activity. `steps`, `tokens`: by stage. `curve`: a line per step.
    `evaluations`: by name, solved shares per problem. `done`: stages that are over."""

    model: str
    steps: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: dict[str, dict[str, int]] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    held_out: str = ""  # digest of the problems that were evaluated; empty: none yet

    def spent(self, stage: str) -> float:
        return sum(self.seconds.get(stage, {}).values())


class Run:
    """One folder's run, from where it stands."""

    def __init__(self, folder: Path, model: str, minutes: float, sitting: float, sandbox: bool, threads: int) -> None:
        self.folder, self.plan, self.minutes = folder, PLANS[model], minutes
        self.deadline = time.monotonic() + sitting * 60
        self.sandbox, self.threads = sandbox, threads
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "objects").mkdir(exist_ok=True)
        self.objects = connect(f"file:{folder.absolute()}/objects")
        path = folder / "state.json"
        self.state = msgspec.convert(json.loads(path.read_text()), State) if path.is_file() else State(model)
        if self.state.model != model:
            raise SystemExit(f"--model: found {model}; allowed: {self.state.model}, which {folder} holds")

    def go(self) -> None:
        """Do what is left. Raises SittingOver."""
        start = self.base()
        self.evaluate("before_sft", start)
        self.practise("sft", start, self.folder / "after_sft")
        self.evaluate("after_sft", self.folder / "after_sft")
        self.practise("rl", self.folder / "after_sft", self.folder / "after_rl")
        self.evaluate("after_rl", self.folder / "after_rl")

    # Stages

    def base(self) -> Path:
        """Return the checkpoint that SFT begins with; make it if there is none yet."""
        out = self.folder / "base"
        if "base" in self.state.done:
            return out
        if self.state.model == "smollm":
            if not (SMOLLM / "config.json").is_file():
                raise SystemExit(f"{SMOLLM}: no checkpoint; `make smollm` makes one")
            small.copy_speech(SMOLLM, out, tools="short", system="", context=small.CONTEXT)
            for name in ("config.json", "model.safetensors"):
                (out / name).write_bytes((SMOLLM / name).read_bytes())
        else:
            plan, random = self.plan, self.folder / "random"
            small.create(random, model=plan.shape, vocabulary=plan.vocabulary, texts=plan.texts)
            minutes = self.minutes * plan.shares["pretrain"]
            lines = small.pretrain(
                random, out, self.folder / "pretrain", minutes, int(plan.traces * self.minutes), self.over
            )
            self.state.seconds["pretrain"] = {"training": lines[-1]["minutes"] * 60}
            self.state.tokens["pretrain"] = {"trained": lines[-1]["tokens"]}
            self.state.curve += [{"stage": "pretrain", "minutes": x["minutes"], "loss": x["action"]} for x in lines]
        self.state.done.append("base")
        self.save()
        return out

    def practise(self, stage: str, start: Path, out: Path) -> None:
        """Train until the stage's share of the minutes is spent, with checkpoints; write the checkpoint `out`."""
        if stage in self.state.done:
            return
        policy = self.policy(start, stage)
        kept = self.folder / f"{stage}.safetensors"
        if kept.is_file():
            policy.engine.load(load_file(kept))
        policy.clock.seconds = dict(self.state.seconds.get(stage, {}))
        saved = time.monotonic()
        while (progress := self.progress(stage)) < 1:
            step = self.state.steps.get(stage, 0) + 1
            line = self.sft_step(policy, step, progress) if stage == "sft" else self.rl_step(policy, step, progress)
            self.state.steps[stage] = step
            self.state.seconds[stage] = dict(policy.clock.seconds)
            self.state.curve.append({"stage": stage, "step": step, "minutes": self.state.spent(stage) / 60, **line})
            print(f"{stage} {step}: {line}", flush=True)
            over = self.over()
            if over or time.monotonic() - saved > SAVE_EVERY_S:
                save_whole(policy.engine.state(), kept)
                self.count(stage, policy)
                self.save()
                saved = time.monotonic()
            if over:
                policy.close()
                raise SittingOver
        small.copy_speech(start, out)
        save_checkpoint(policy.model, out)
        policy.close()
        self.count(stage, policy)
        self.state.done.append(stage)
        self.save()
        kept.unlink(missing_ok=True)

    def progress(self, stage: str) -> float:
        if not self.state.steps.get(stage):
            return 0.0
        return min(1.0, self.state.spent(stage) / (self.minutes * 60 * self.plan.shares[stage]))

    def sft_step(self, policy: Policy, step: int, progress: float) -> dict[str, float]:
        tasks = generate("train", self.plan.traces_per_step, SFT_SEED + step)
        trained = policy.sft(tasks, step, progress)
        sampled = trained.metrics["tokens_sampled"]
        loss = trained.metrics["loss"] * policy.config.norm_tokens * len(tasks) / sampled
        return {"loss": round(loss, 4), "grad_norm": round(trained.metrics["grad_norm"], 3), "traces": len(tasks)}

    def rl_step(self, policy: Policy, step: int, progress: float) -> dict[str, float]:
        tasks = generate("train", self.plan.groups, RL_SEED + step, self.objects)
        groups, trained = policy.rl(tasks, self.plan.group_size, step, progress)
        solved = float(np.mean([a.solved for g in groups for a in g]))
        mixed = float(np.mean([0 < sum(a.solved for a in g) < len(g) for g in groups]))
        metrics = trained.metrics
        return {
            "solved": round(solved, 4),
            "mixed_groups": round(mixed, 4),
            "entropy": round(metrics["entropy"], 4),
            "mismatch": float(metrics.get("mismatch_log_ratio_max", 0.0)),
            "grad_norm": round(metrics["grad_norm"], 4),
        }

    def evaluate(self, name: str, checkpoint: Path) -> None:
        if name in self.state.evaluations:
            return
        tasks = generate("held_out", self.plan.held_out, HELD_OUT_SEED, self.objects)
        self.require_same(tasks)
        policy = self.policy(checkpoint, "rl")
        greedy = policy.attempts(tasks, 1, 0.0)
        sampled = policy.attempts(tasks, self.plan.samples, 1.0)
        policy.close()
        attempts = [a for g in greedy for a in g]
        self.state.evaluations[name] = {
            "greedy": [float(g[0].solved) for g in greedy],
            "sampled": [float(np.mean([a.solved for a in g])) for g in sampled],
            "kinds": [task.kind for task in tasks],
            "submitted": float(np.mean([a.trajectory.stop.value == "submitted" for a in attempts])),
            "edited": float(np.mean([bool(a.trajectory.changes) for a in attempts])),
            "turns": float(np.mean([a.trajectory.effort.turns for a in attempts])),
        }
        self.state.seconds[f"evaluation {name}"] = dict(policy.clock.seconds)
        self.count(f"evaluation {name}", policy)
        self.save()
        found = self.state.evaluations[name]
        print(f"{name}: greedy {np.mean(found['greedy']):.3f}, sampled {np.mean(found['sampled']):.3f}, "
              f"submitted {found['submitted']:.2f}, edited {found['edited']:.2f}", flush=True)  # fmt: skip
        if self.over():
            raise SittingOver

    # Pieces

    def over(self) -> bool:
        """Return whether the time of this sitting is over."""
        return time.monotonic() > self.deadline

    def require_same(self, tasks: Sequence[Task]) -> None:
        """Remember the held-out problems; end the program where earlier evaluations were on others."""
        digest = xxhash.xxh3_64_hexdigest("".join(repr((task.problem, task.hidden)) for task in tasks).encode())
        if self.state.held_out not in ("", digest):
            raise SystemExit(f"{self.folder}: was evaluated on other held-out problems; begin in another folder")
        self.state.held_out = digest

    def policy(self, checkpoint: Path, stage: str) -> Policy:
        plan = self.plan
        config = TrainConfig(
            learning_rate=plan.sft_rate if stage == "sft" else plan.rl_rate,
            cooldown=0.5,
            importance_clip=1.0 if stage == "sft" else 2.0,
            norm_tokens=100.0,
            router_replay=False,
            mtp=False,
            micro_batch_tokens=plan.micro_batch_tokens,
        )
        return Policy(
            checkpoint, config, self.objects, self.folder / "cache",
            sandbox=self.sandbox, at_once=plan.at_once, positions=small.CONTEXT, threads=self.threads,
            samplers=self.threads,
        )  # fmt: skip

    def count(self, stage: str, policy: Policy) -> None:
        known = self.state.tokens.setdefault(stage, {"sampled": 0, "trained": 0})
        known["sampled"] += policy.sampled_tokens
        known["trained"] += policy.trained_tokens
        policy.sampled_tokens = policy.trained_tokens = 0

    def save(self) -> None:
        write_whole(self.folder / "state.json", json.dumps(msgspec.to_builtins(self.state), indent=1) + "\n")
        records.write(self.folder / "records.json", to_records(self.state))
        plot(self.state, self.folder / "curve.png")


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """Write the file aside and rename it: a run that is killed leaves the earlier one."""
    draft = path.with_name(f".{path.name}")
    save_file(tensors, draft)
    draft.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resume", type=Path, required=True, metavar="DIR", help="the state's folder; made if missing")
    parser.add_argument("--model", choices=("smollm", "small"), default="smollm")
    parser.add_argument("--minutes", type=float, default=110.0, help="of practice, without evaluations")
    parser.add_argument(
        "--sitting", type=float, default=150.0, help="minutes; later the state is saved and the run ends"
    )
    parser.add_argument("--tools", choices=("sandbox", "memory"), default="sandbox", help="where tools find the files")
    parser.add_argument("--threads", type=int, default=2, help="of the trainer, and engines that sample")
    parser.add_argument("--held-out", type=int, help="problems; another number needs another folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there, too")
    parser.add_argument("--quick", action="store_true", help="the machinery alone, a minute or two")
    options = parser.parse_args(argv)
    model, minutes = ("tiny", 0.1) if options.quick else (options.model, options.minutes)
    if options.held_out:
        PLANS[model] = replace(PLANS[model], held_out=options.held_out)
    run = Run(options.resume, model, minutes, options.sitting, options.tools == "sandbox", options.threads)
    try:
        run.go()
    except SittingOver:
        print(f"this sitting is over; the same command goes on from {options.resume}", flush=True)
    found = to_records(run.state)
    records.show(found)
    if options.json:
        records.write(options.json, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
