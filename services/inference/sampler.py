"""Plain temperature sampling of a batch: one softmax, one cumulative sum, one uniform number per row."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor

from services.inference.kernels.sampling import sample_rows


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of a seeded request at a position: the same whatever the batch around it."""
    return (xxhash.xxh3_64_intdigest(b"%d|%d" % (seed, position)) >> 40) / (1 << 24)


def scaled(logits_NV: Tensor, temperatures_N: np.ndarray) -> Tensor:
    """Log-probabilities under the sampling temperature; for temperature 0, under 1."""
    scale_N = np.where(temperatures_N == 0, 1.0, temperatures_N).astype(np.float32)
    if not (scale_N == 1).all():
        logits_NV = logits_NV / torch.from_numpy(scale_N)[:, None]
    return logits_NV.log_softmax(-1)


def draw(weights_BV: Tensor, uniforms_B: np.ndarray) -> Tensor:
    """Ids int64 [B], in proportion to rows of weights that need not sum to 1; one without weight is never drawn."""
    cumulative_BV = weights_BV.cumsum(-1)
    # Below 1 in float32 too, so that a threshold is below the total and some id's weight reaches over it.
    below_one = np.minimum(uniforms_B.astype(np.float32), np.float32(1 - 2**-24))
    thresholds_B1 = torch.from_numpy(below_one)[:, None] * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, thresholds_B1, right=True)[:, 0]


def sample(logits_BV: Tensor, temperatures_B: np.ndarray, uniforms_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids int64 [B] and their log-probabilities float32 [B] under the sampling temperature.

    Temperature 0 takes the largest logit and reports its log-probability at temperature 1.
    """
    B, V = logits_BV.shape
    logits = logits_BV.to("cpu", torch.float32).contiguous().numpy()
    tokens_B, chosen_B = np.empty(B, np.int64), np.empty(B, np.float32)
    sample_rows(logits, temperatures_B, uniforms_B, np.empty(V, np.float32), tokens_B, chosen_B)
    return tokens_B, chosen_B
