"""Plain temperature sampling of a batch: one softmax, one sum, one uniform number per row."""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor

from services.inference.kernels.sampling import propose_rows, sample_rows


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of a seeded request at a position: the same whatever the batch around it."""
    return (xxhash.xxh3_64_intdigest(b"%d|%d" % (seed, position)) >> 40) / (1 << 24)


def host(logits_BV: Tensor) -> np.ndarray:
    """As the compiled loops read them: float32 [B, V], contiguous, in host memory."""
    return logits_BV.to("cpu", torch.float32).contiguous().numpy()


def sample(logits_BV: Tensor, temperatures_B: np.ndarray, uniforms_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids int64 [B] and their log-probabilities float32 [B] under the sampling temperature.

    Temperature 0 takes the largest logit and reports its log-probability at temperature 1.
    """
    B, V = logits_BV.shape
    logits = host(logits_BV)
    tokens_B, chosen_B = np.empty(B, np.int64), np.empty(B, np.float32)
    sample_rows(logits, temperatures_B, uniforms_B, np.empty(V, np.float32), tokens_B, chosen_B)
    return tokens_B, chosen_B


def propose(logits_BV: Tensor, temperatures_B: np.ndarray, uniforms_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids int64 [B] and the distributions float32 [B, V] that they were drawn from; temperature 0 takes the
    largest logit."""
    logits = host(logits_BV)
    tokens_B, probabilities_BV = np.empty(len(logits), np.int64), np.empty_like(logits)
    propose_rows(logits, temperatures_B, uniforms_B, probabilities_BV, tokens_B)
    return tokens_B, probabilities_BV
