"""Router replay: the engine's recorded experts for every fed token of a micro-batch.

With a shared prefix the rows of its first branch stand for all: `packing` shares a prefix only where they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from services.trainer.packing import TrainSequence, Unit
from shared.model import Replay


def build(units: Sequence[Unit], L: int, K: int, tau: float, device: torch.device | str = "cpu") -> Replay | None:
    """Rows in the flat order of `layout.lay_out`. None if the model has no MoE layers or nothing was recorded."""
    if L == 0 or all(s.experts_TLK is None for unit in units for s in unit.sequences):
        return None
    rows: list[np.ndarray] = []
    valid: list[np.ndarray] = []
    for unit in units:
        P = unit.prefix
        for start, end, s in _spans(unit, P):
            length = end - start
            if s.experts_TLK is None:
                rows.append(np.zeros((length, L, K), np.int64))
                valid.append(np.zeros(length, bool))
            else:
                rows.append(s.experts_TLK[start:end].astype(np.int64))
                valid.append(np.ones(length, bool))
    experts = torch.as_tensor(np.concatenate(rows)).to(device)
    return Replay(experts, torch.as_tensor(np.concatenate(valid)).to(device), tau)


def _spans(unit: Unit, P: int) -> list[tuple[int, int, TrainSequence]]:
    branches = [(P, len(s.tokens_T) - 1, s) for s in unit.sequences]
    return [(0, P, unit.sequences[0]), *branches]
