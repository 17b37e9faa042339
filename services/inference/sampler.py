"""Plain temperature sampling of a batch: one softmax, one cumulative sum, one uniform number per row."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of a seeded request at a position: the same whatever the batch around it."""
    return (xxhash.xxh3_64_intdigest(b"%d|%d" % (seed, position)) >> 40) / (1 << 24)


def sample(logits_BV: Tensor, temperatures_B: np.ndarray, uniforms_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids int64 [B] and their log-probabilities float32 [B] under the sampling temperature.

    Temperature 0 takes the largest logit and reports its log-probability at temperature 1.
    """
    greedy = temperatures_B == 0
    scale_B1 = torch.from_numpy(np.where(greedy, 1.0, temperatures_B).astype(np.float32))[:, None]
    plain = bool((scale_B1 == 1).all())
    logprobs_BV = (logits_BV if plain else logits_BV / scale_B1).log_softmax(-1)
    if greedy.all():
        tokens_B = logits_BV.argmax(-1)
    else:
        cumulative_BV = logprobs_BV.exp().cumsum(-1)
        # The total is 1 up to rounding; scaling by it keeps every threshold inside.
        thresholds_B1 = torch.from_numpy(uniforms_B.astype(np.float32))[:, None] * cumulative_BV[:, -1:]
        tokens_B = torch.searchsorted(cumulative_BV, thresholds_B1, right=True)[:, 0].clamp_(max=logits_BV.shape[1] - 1)
        if greedy.any():
            tokens_B = torch.where(torch.from_numpy(greedy), logits_BV.argmax(-1), tokens_B)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    return tokens_B.numpy(), chosen_B.numpy()
