"""One rank of a trainer with its run, as a process: `python ranks_of_a_run.py FOLDER STEPS`. A launcher sets RANK and WORLD_SIZE.

Rank 0 trains STEPS steps on synthetic groups, two each, and appends a line `<step> <checksum of the published weights>` to
FOLDER/said. KILL="<rank> <n>": this rank kills itself at its n-th call into the engine.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from synthetic import SHAPE, group, run_config

from services.trainer import groups, masters
from services.trainer.engine import Engine
from services.trainer.ranks import Options, Rank, Ranks, follow
from services.trainer.training import TrainingRun
from shared import objects as stores
from shared import weights
from shared.contracts.run import TrainConfig

RANK = int(os.environ["RANK"])


def kill_at(call: int) -> None:
    """SIGKILL at the n-th call of a method that computes, decides or collects."""
    count = 0

    def counted(real: Any) -> Any:
        def method(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return method

    for name in ("backward", "backward_mtp", "step", "from_all", "state", "load"):
        setattr(Engine, name, counted(getattr(Engine, name)))


def lead(folder: Path, steps: int) -> None:
    objects = stores.connect((folder / "objects").as_uri())
    train = TrainConfig(learning_rate=1e-2, checkpoint_every=1, base_every=3, norm_tokens=8.0, micro_batch_tokens=32)
    config = run_config(objects, folder / "base", train)
    ranks = Ranks(Rank(objects, folder / "cache"))
    options = Options(zero_stage=2, expert_ranks=2, mtp_stride=1)
    training = TrainingRun(objects, config, trainer="t", cache=folder / "cache", ranks=ranks, options=options)
    while training.step < steps:
        numbers = (2 * training.step, 2 * training.step + 1)
        # A group that is in the lineage already is dropped, as the service drops it.
        found = [g for g in (group(objects, number) for number in numbers) if not training.knows(g.group)]
        assert len(found) == 2, "a group of a step that did not survive counts as trained"
        result = training.advance([groups.load(objects, g, SHAPE, train) for g in found])
        assert result.committed is not None, result
        training.checkpoint()
        digest = weights.checksum(masters.PublishedBits().copy(ranks.call("published")))
        with (folder / "said").open("a") as file:
            file.write(f"{training.step} {digest}\n")
    ranks.end()


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    victim, call = map(int, (os.environ.get("KILL") or "-1 0").split())
    if victim == RANK:
        kill_at(call)
    if RANK:
        objects = stores.connect((folder / "objects").as_uri())
        follow(Rank(objects, folder / f"cache-{RANK}"))
    else:
        lead(folder, steps)
    os._exit(0)


if __name__ == "__main__":
    main()
