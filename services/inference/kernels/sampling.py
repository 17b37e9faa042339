"""Draws one token for each row of logits."""

from __future__ import annotations

import numpy as np

from services.inference.kernels import compiled
from services.inference.kernels.pointwise import exponentials


@compiled
def sample_rows(logits, temperatures, uniforms, weights, tokens, chosen):  # type: ignore[no-untyped-def]
    """`weights` is room for one row; tokens and their log-probabilities are written. See `sampler.sample`."""
    B, V = logits.shape
    for b in range(B):
        greedy = temperatures[b] == 0
        scale = np.float32(1) if greedy else np.float32(1 / temperatures[b])
        best, first = np.float32(-1e30), 0
        for v in range(V):
            weights[v] = logits[b, v] * scale
            if weights[v] > best:
                best, first = weights[v], v
        total = exponentials(weights, best)
        token = first  # also where rounding lets no sum reach the threshold
        if not greedy:
            threshold = uniforms[b] * np.float64(total)
            reached = np.float64(0)
            for v in range(V):
                reached += weights[v]
                if reached > threshold:
                    token = v
                    break
        tokens[b] = token
        chosen[b] = logits[b, token] * scale - best - np.log(total)
