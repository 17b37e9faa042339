"""`python -m services.trainer`: settings from ETUDE_… and ETUDE_CONFIG; `--check` prints them.

Several ranks: `torchrun --nproc-per-node 4 -m services.trainer`, or any launcher that sets RANK and WORLD_SIZE. Rank 0 is the
service; the others follow it (see `ranks`).
"""

from __future__ import annotations

import asyncio
import os
import sys

import torch

from services.trainer.config import TrainerSettings
from services.trainer.mesh import BadMesh, Mesh
from services.trainer.ranks import Rank, follow
from services.trainer.service import serve
from shared import objects
from shared.bus.watched import opened
from shared.settings import load
from shared.telemetry import Health, configure_logs, draining


async def run(settings: TrainerSettings) -> None:
    async with (
        draining() as stop,
        Health("trainer", settings) as health,
        opened(settings.bus_url, health) as messages,
    ):
        await serve(settings, messages, objects.connect(settings.objects_url), health, stop)


def main() -> None:
    settings = load(TrainerSettings)
    configure_logs("trainer", settings)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        Mesh.of(rank, world, settings.trainer_context_ranks, settings.trainer_expert_ranks)
    except BadMesh as error:
        sys.exit(f"trainer: {error}")
    if rank > 0:
        torch.set_num_threads(settings.trainer_threads)
        own = Rank(objects.connect(settings.objects_url), settings.state / f"trainer-rank-{rank}", settings.device)
        return follow(own)
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
