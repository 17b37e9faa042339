"""One rank of a trainer that computes steps of the same batch in several layouts, as a process: `python ranks_of_a_step.py FOLDER
LAYOUT...`. A layout is "ZeRO stage,context ranks,expert ranks,arithmetic". A launcher sets RANK and WORLD_SIZE.

Every rank says the figures of each layout on a line. Rank 0 writes what a checkpoint would hold to FOLDER/<layout>.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from rank_processes import say
from safetensors.torch import save_file
from test_ranks import KL, figures, other_policy, trained

from services.trainer.engine import Engine


def main() -> None:
    torch.set_num_threads(1)
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    for layout in layouts:
        *sizes, arithmetic = layout.split(",")
        stage, context, expert = map(int, sizes)
        metrics, engine = trained(stage, context, expert, getattr(torch, arithmetic))
        state = engine.state()
        if engine.mesh.rank == 0:
            save_file(state, folder / layout)
        say(*figures(metrics))
        # A checkpoint of one layout loads in every other, and is the same there.
        torch.distributed.barrier()
        again = Engine(other_policy(), KL, zero_stage=1, expert_ranks=expert)
        whole = engine.from_all(state)[0]
        again.load(whole)
        loaded = again.state()
        assert engine.mesh.rank or all(torch.equal(tensor, whole[name]) for name, tensor in loaded.items())
    os._exit(0)


if __name__ == "__main__":
    main()
