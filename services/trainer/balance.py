"""The routers' load-balancing loss of a phase. Pure but for the sum over the ranks that share a sequence.

It is taken sequence by sequence. A mean over a micro-batch would be another loss for every way of cutting the step, and so for
every number of ranks. N: rows of this rank; L: MoE layers; E: experts; K: experts of a token; U: sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def balancing_loss(
    router_logits: Sequence[Tensor],
    experts_NLK: Tensor,
    sequence_N: Tensor,
    rows_U: Tensor,
    weight_U: Tensor,
    add_up: Callable[[Tensor], Tensor] = lambda counts: counts,
) -> Tensor:
    """Return the sum over sequences of weight * E * sum_e (share of assignments to e) * (mean probability of e), a scalar, as a
    mean over layers: 1 for a sequence of weight 1 that is balanced, E where all its tokens go to one expert.

    `router_logits`: float32 [N, E] of each layer, with their graph. `sequence_N`: int64, which sequence a row is of. `rows_U`:
    rows of each sequence on all ranks together. `add_up` sums counts [L, U, E] over the ranks that share the sequences; what the
    ranks return then adds up to the loss."""
    _, L, K = experts_NLK.shape
    E, U = router_logits[0].shape[1], len(rows_U)
    place = (torch.arange(L, device=sequence_N.device)[:, None] * U + sequence_N) * E  # [L, N]
    flat = (place[:, :, None] + experts_NLK.transpose(0, 1)).flatten()
    counts = add_up(torch.bincount(flat, minlength=L * U * E).view(L, U, E))
    share_LUE = counts.to(rows_U.dtype) / (rows_U[:, None] * K)
    each_N = (weight_U / rows_U)[sequence_N]
    losses = [
        E * (each_N * (share_UE[sequence_N] * logits.softmax(-1)).sum(-1)).sum()
        for share_UE, logits in zip(share_LUE, router_logits, strict=True)
    ]
    return torch.stack(losses).mean()
