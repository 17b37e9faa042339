"""Greatest memory of one step of Étude's trainer on one sequence, in a process of its own.

python -m benchmarks.trainers.memory CHECKPOINT TOKENS [--recompute]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.policies import THIRTY_MILLION, random_policy
from services.trainer.engine import Engine, start_distributed
from services.trainer.masters import PublishedBits
from services.trainer.packing import TrainSequence
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import load_checkpoint, published_tensors

TINY = THIRTY_MILLION | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}


def status(field: str) -> float:
    """Return a field of /proc/self/status in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


def sequence(tokens: int, vocabulary: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    T = tokens + 1  # the last one is not fed
    return [
        TrainSequence(
            group=0,
            tokens_T=rng.integers(0, vocabulary, T).astype(np.int32),
            sampled_T=np.arange(T) > 0,
            logprobs_T=np.full(T, -7.0, np.float32),
            versions_T=np.zeros(T, np.int32),
            advantages_T=np.ones(T, np.float32),
            temperature=1.0,
            experts_TLK=None,
        )
    ]


def main(checkpoint: str, tokens: str, *options: str) -> None:
    torch.set_num_threads(1)
    start_distributed()
    config = TrainConfig(mtp=False, router_replay=False, norm_tokens=100.0, learning_rate=1e-6)
    Trainer(Engine(random_policy(TINY), config), config).train(sequence(64, 64), 1, 1)  # loads all libraries
    process = status("VmRSS")
    model = load_checkpoint(checkpoint, dtype=torch.float32)
    model.recomputes = "--recompute" in options
    trainer = Trainer(Engine(model, config), config)
    buffers = PublishedBits(), PublishedBits()  # as `versions` holds them
    trainer.train(sequence(64, model.config.vocab_size), 1, 1)  # makes the optimiser's moments
    for buffer in buffers:
        buffer.copy(published_tensors(model))
    Path("/proc/self/clear_refs").write_text("5")  # forget the greatest memory so far: that of loading
    began = time.perf_counter()
    trainer.train(sequence(int(tokens), model.config.vocab_size), 1, 2)
    print(json.dumps({"process": process, "peak": status("VmHWM"), "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
