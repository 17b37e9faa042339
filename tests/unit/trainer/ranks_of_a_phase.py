"""One rank of phases, as a process: `python ranks_of_a_phase.py JOB...`. A job is PHASE:CONFIG.toml:STEPS and is run after the one
before it; it is asked to stop after STEPS steps, and 0 lets it finish. `{rank}` in a path is the rank's number. A launcher sets
RANK and WORLD_SIZE.

Says "finished" or "stopped" for each job, or what the phase refused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed
from rank_processes import say

from services.trainer.phases.config import PHASES, BadPhase, read
from services.trainer.phases.phase import run
from services.trainer.phases.screen import Silent
from services.trainer.phases.state import Progress


class Counts(Silent):
    """Knows how many steps were made."""

    steps = 0

    def step(self, progress: Progress, loss: float, tokens_per_s: float) -> None:
        self.steps += 1


def main() -> None:
    for job in sys.argv[1:]:
        name, path, limit = job.split(":")
        phase = PHASES[PHASES.index(name)]  # type: ignore[arg-type]
        screen = Counts()
        # Rank 0 alone is told to stop: the others must hear of it.
        asked = int(limit) if os.environ["RANK"] == "0" else 0
        try:
            config = read(Path(path.format(rank=os.environ["RANK"])), phase)
            outcome = run(config, phase, screen, lambda screen=screen, asked=asked: 0 < asked <= screen.steps)
            say("finished" if outcome.finished else "stopped")
        except BadPhase as error:
            say(error)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # rank 0 has written what the next job reads
    os._exit(0)


if __name__ == "__main__":
    main()
