"""Learning-rate schedules: the share of the full rate at a place in a phase. Pure. Warm-up comes on top (see engine)."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["constant", "cosine", "wsd", "linear"]


def share(kind: Kind, progress: float, *, floor: float = 0.0, decay: float = 0.2) -> float:
    """Return the share of the full learning rate.

    `progress`: of the phase that is over, 0 to 1. `floor`: the share at the end. `decay`: last share of the phase in which
    `wsd` (warm-up, stable, decay) falls linearly. `cosine` is half a wave, `linear` one line from 1 to `floor`.
    """
    progress = min(1.0, max(0.0, progress))
    if kind == "constant":
        return 1.0
    if kind == "cosine":
        fallen = (1.0 - math.cos(math.pi * progress)) / 2
    elif kind == "linear":
        fallen = progress
    else:
        fallen = max(0.0, 1.0 - (1.0 - progress) / decay) if decay else 0.0
    return 1.0 - (1.0 - floor) * fallen
