"""Trained tokens a second of Étude's trainer and of TRL's GRPOTrainer, over the same groups of 8 on the same checkpoint.

Loss, backward, clipping and AdamW in float32 on one thread; processor seconds, so that other load distorts less. Each side runs
in a process of its own and takes the best of several sizes of a micro-batch. A trained token is a sampled token of the batch, so
the ratio of the rates is that of the seconds. Experts are not replayed and the speculation head does not learn: TRL does neither.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.policies import BASE, ROOT, SMOLLM, THIRTY_MILLION, is_here, random_policy, start
from benchmarks.records import Bench, record
from shared.model import ModelConfig, save_checkpoint

TRL = ROOT / ".cache" / "trl" / "bin" / "python"  # made by `make trl`
ATTEMPTS = 8
Lengths = Callable[[np.random.Generator], int]


@dataclass(frozen=True)
class Mix:
    """`prompt` of a group and `reply` of each of its attempts, in tokens."""

    prompt: Lengths
    reply: Lengths


DEMO = Mix(lambda rng: int(rng.integers(120, 240)), lambda rng: int(rng.integers(20, 144)))
EQUAL = Mix(lambda rng: int(rng.integers(120, 240)), lambda rng: int(rng.integers(120, 240)))
FOUR_TO_ONE = Mix(lambda rng: 512, lambda rng: 128)


@dataclass(frozen=True)
class Took:
    seconds: list[float]  # of each repeat, at the best size of a micro-batch
    size: int
    memory_mib: float  # greatest of the process up to then


def draw(path: Path, mix: Mix, groups: int, vocabulary: int) -> None:
    rng = np.random.default_rng(0)
    tokens, sampled, advantages, of_group = [], [], [], []
    for group in range(groups):
        prompt = rng.integers(0, vocabulary, mix.prompt(rng))
        for _ in range(ATTEMPTS):
            reply = rng.integers(0, vocabulary, mix.reply(rng))
            own = rng.random(len(reply)) < 0.8
            own[0] = True
            tokens.append(np.concatenate((prompt, reply)))
            sampled.append(np.concatenate((np.zeros(len(prompt), bool), own)))
            advantages.append(rng.normal())
            of_group.append(group)
    starts = np.cumsum([0, *map(len, tokens[:-1])])
    np.savez(
        path,
        tokens=np.concatenate(tokens),
        sampled=np.concatenate(sampled),
        starts=starts,
        advantages=advantages,
        groups=of_group,
    )


def run(module: str, python: Path, *arguments: object) -> Took:
    """Return the best of the sizes. Raises RuntimeError with the end of what the process said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [str(python), "-m", f"benchmarks.trainers.{module}", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"benchmarks.trainers.{module}: {done.stderr.strip()[-800:]}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    best = min(found, key=lambda entry: float(np.median(entry["seconds"])))
    return Took(best["seconds"], best["rows"], best["memory_mib"])


def checkpoints(folder: Path) -> dict[str, tuple[Path, int]]:
    """Return a checkpoint and the groups of a step for each model, by name."""
    demo, thirty = folder / "demo", folder / "30m"
    save_checkpoint(start(), demo)
    save_checkpoint(random_policy(THIRTY_MILLION), thirty)
    found = {"demo": (BASE if is_here(BASE) else demo, 16), "30m": (thirty, 4)}
    if is_here(SMOLLM):
        found["smollm2"] = (SMOLLM, 1)
    return found


def compare(bench: Bench, folder: Path) -> None:
    """Add `train.vs_trl…` and `train.prefix_sharing`."""
    models = checkpoints(folder)
    _sharing(bench, folder, models["30m"][0])
    if not TRL.exists():
        print("TRL is not here (make trl): without it this benchmark does", file=sys.stderr)
        return
    mixes = {"": DEMO, ".equal": EQUAL}
    for name, (checkpoint, groups) in models.items():
        for suffix, mix in mixes.items():
            if bench.quick and (name, suffix) != ("demo", ""):
                continue
            _against_trl(bench, folder, name, suffix, mix, checkpoint, groups)


def _against_trl(bench: Bench, folder: Path, name: str, suffix: str, mix: Mix, checkpoint: Path, groups: int) -> None:
    vocabulary = ModelConfig.load(checkpoint).vocab_size
    batch, repeats = folder / "batch.npz", bench.pick(5, 2)
    draw(batch, mix, groups, vocabulary)
    ours = run("ours", Path(sys.executable), checkpoint, batch, 1, repeats, *bench.pick((2048, 4096, 8192), (4096,)))
    theirs = run("trl", TRL, checkpoint, batch, 1, repeats, *bench.pick((4, 8, 16, 32), (8,)))
    id = f"train.vs_trl{'' if name == 'demo' else f'.{name}'}{suffix}"
    median = float(np.median(ours.seconds))
    what = f"{name}, {groups} groups of 8, {'demo lengths' if not suffix else 'prompts as long as replies'}"
    against = f"TRL {np.median(theirs.seconds):.2f} s ({theirs.size} rows), ours {median:.2f} s ({ours.size} tokens)"
    bench.add(record(id, what, [seconds / median for seconds in theirs.seconds], "x", against))
    against = f"TRL {theirs.memory_mib:,.0f} MiB, ours {ours.memory_mib:,.0f} MiB"
    bench.add(
        record(f"{id}.memory", f"peak memory, {what}", [ours.memory_mib / theirs.memory_mib], "of TRL's", against)
    )


def _sharing(bench: Bench, folder: Path, checkpoint: Path) -> None:
    batch, repeats = folder / "sharing.npz", bench.pick(5, 2)
    draw(batch, FOUR_TO_ONE, bench.pick(4, 2), ModelConfig.load(checkpoint).vocab_size)
    arguments = (checkpoint, batch, 1, repeats, *bench.pick((4096, 8192), (4096,)))
    shared = run("ours", Path(sys.executable), *arguments)
    unshared = run("ours", Path(sys.executable), *arguments, "--unshared")
    limit = ATTEMPTS * (4 + 1) / (4 + ATTEMPTS)
    median = float(np.median(shared.seconds))
    bench.add(
        record(
            "train.prefix_sharing",
            "30M, groups of 8, prompts four times as long as replies",
            [seconds / median for seconds in unshared.seconds],
            "x",
            f"limit by tokens {limit:.2f}; unshared {np.median(unshared.seconds):.1f} s, shared {median:.1f} s",
        )
    )
