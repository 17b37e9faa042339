"""One RL step of the demo on one thread: 16 groups of 8 attempts, prompts of about 180 tokens, completions of about 80; then
beside TRL's GRPOTrainer and without shared prefixes (benchmarks.trainers.comparison).

Seconds of processor time, so that other load on the machine distorts less. A group of equal rewards carries no signal
and is skipped; in the demo that is about every second one.

python -m benchmarks.train_step [--quick] [--json FILE] [--only settings|peers]
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.policies import start
from benchmarks.records import Bench
from benchmarks.trainers.comparison import compare
from services.trainer.engine import Engine
from services.trainer.packing import TrainSequence
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import ModelConfig

GROUPS, ATTEMPTS = 16, 8


def routing(rng: np.random.Generator, rows: int, shape: ModelConfig) -> np.ndarray:
    """Distinct experts per row and layer, evenly drawn."""
    assert shape.moe is not None
    scores = rng.random((rows, shape.num_moe_layers, shape.moe.num_experts))
    return scores.argsort(-1)[..., : shape.num_experts_per_tok].astype(np.uint8)


def step_of(shape: ModelConfig, with_signal: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    found = []
    for group in range(GROUPS):
        P = int(rng.integers(120, 240))
        prompt, prompt_rows = rng.integers(0, shape.vocab_size, P), routing(rng, P, shape)
        for _ in range(ATTEMPTS):
            C = int(rng.integers(20, 144))
            sampled = np.concatenate((np.zeros(P, bool), rng.random(C) < 0.8))
            sampled[P] = True
            found.append(
                TrainSequence(
                    group=group,
                    tokens_T=np.concatenate((prompt, rng.integers(0, shape.vocab_size, C))),
                    sampled_T=sampled,
                    logprobs_T=np.full(P + C, -7.0, np.float32),
                    versions_T=np.zeros(P + C, np.int32),
                    advantages_T=np.full(P + C, rng.normal() if group < with_signal else 0.0, np.float32),
                    temperature=1.0,
                    experts_TLK=np.concatenate((prompt_rows, routing(rng, C - 1, shape))),
                )
            )
    return found


def main() -> None:
    bench = Bench.start(__doc__, parts=("settings", "peers"))
    if bench.wants("settings"):
        settings(bench)
    if bench.wants("peers"):
        with tempfile.TemporaryDirectory() as folder:
            compare(bench, Path(folder))
    bench.end()


def settings(bench: Bench) -> None:
    torch.set_num_threads(1)
    number = 0

    def seconds(trainer: Trainer, sequences: list[TrainSequence]) -> float:
        nonlocal number
        number += 1
        began = time.process_time()
        trainer.train(sequences, GROUPS * ATTEMPTS, number)
        return time.process_time() - began

    def case(name: str, what: str, signal: int, *, against: str = "", share: bool = True, mtp_stride: int = 4) -> float:
        config = TrainConfig(mtp=mtp_stride > 0, norm_tokens=40.0)
        model = start()
        sequences = step_of(model.config, signal)
        trainer = Trainer(Engine(model, config), config, share_prefixes=share, mtp_stride=max(1, mtp_stride))
        seconds(trainer, sequences[: 2 * ATTEMPTS])  # warm up
        measured = bench.measure(
            f"train_step.{name}", what, "s", lambda: seconds(trainer, sequences), against=against, repeats=5
        )
        return measured.value

    whole = case("all", "16 of 16 groups carry signal", GROUPS)
    case("half", "8 of 16 groups carry signal", GROUPS // 2)
    case("no_mtp", "16 of 16, no MTP layer", GROUPS, against=f"with it, every 4th unit {whole:.2f} s", mtp_stride=0)
    case("mtp_all", "16 of 16, MTP on every unit", GROUPS, against=f"every 4th unit {whole:.2f} s", mtp_stride=1)
    case("unshared", "16 of 16, every prompt computed 8 times", GROUPS, against=f"shared {whole:.2f} s", share=False)


if __name__ == "__main__":
    main()
