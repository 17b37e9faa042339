"""Étude's trainer beside its peers: the same arguments and answers as `benchmarks.trainers.trl`; ROWS are tokens of a micro-batch.

python -m benchmarks.trainers.ours CHECKPOINT BATCH.npz THREADS REPEATS TOKENS… [--unshared]
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch

from services.trainer.engine import Engine
from services.trainer.packing import TrainSequence
from services.trainer.step import Trainer
from shared.contracts.run import TrainConfig
from shared.model import load_checkpoint


def read(path: Path) -> list[TrainSequence]:
    with np.load(path) as file:
        cuts = file["starts"][1:]
        return [
            TrainSequence(
                group=int(group),
                tokens_T=tokens.astype(np.int32),
                sampled_T=sampled,
                logprobs_T=np.full(len(tokens), -7.0, np.float32),
                versions_T=np.zeros(len(tokens), np.int32),
                advantages_T=np.full(len(tokens), advantage, np.float32),
                temperature=1.0,
                experts_TLK=None,
            )
            for tokens, sampled, advantage, group in zip(
                np.split(file["tokens"], cuts),
                np.split(file["sampled"], cuts),
                file["advantages"],
                file["groups"],
                strict=True,
            )
        ]


def main(checkpoint: str, file: str, threads: str, repeats: str, *tokens: str) -> None:
    torch.set_num_threads(int(threads))
    shared = "--unshared" not in tokens
    batch = read(Path(file))
    config = TrainConfig(mtp=False, router_replay=False, norm_tokens=100.0, learning_rate=1e-6)
    engine = Engine(load_checkpoint(checkpoint, dtype=torch.float32), config)
    for most in (int(number) for number in tokens if number != "--unshared"):
        trainer = Trainer(engine, msgspec.structs.replace(config, micro_batch_tokens=most), share_prefixes=shared)
        trainer.train(batch[:8], len(batch), 1)  # warm up
        seconds = []
        for _ in range(int(repeats)):
            began = time.process_time()
            trainer.train(batch, len(batch), 1)
            seconds.append(time.process_time() - began)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"rows": most, "seconds": seconds, "memory_mib": memory}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
