"""The routers' balancing loss is the same however the step is cut, and over however many ranks."""

from __future__ import annotations

import numpy as np
import torch

from services.trainer.balance import balancing_loss
from services.trainer.context import own_rows

ROWS, WEIGHTS = (5, 9, 2), (0.2, 0.7, 0.1)
L, E, K = 2, 4, 2


def drawn() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return router logits, experts and the sequence of each row."""
    torch.manual_seed(0)
    logits = [torch.randn(sum(ROWS), E, dtype=torch.float64) for _ in range(L)]
    experts = torch.stack([x.topk(K, -1).indices for x in logits], 1)
    return logits, experts, torch.repeat_interleave(torch.arange(3), torch.tensor(ROWS))


def loss(keep: np.ndarray, add_up=lambda x: x) -> torch.Tensor:  # type: ignore[no-untyped-def]
    logits, experts, sequence = drawn()
    rows, weights = torch.tensor(ROWS, dtype=torch.float64), torch.tensor(WEIGHTS, dtype=torch.float64)
    return balancing_loss([x[keep] for x in logits], experts[keep], sequence[keep], rows, weights, add_up)


def test_it_is_the_weighted_sum_over_sequences_of_the_switch_transformers_loss() -> None:
    logits, experts, sequence = drawn()
    expected = 0.0
    for number, weight in enumerate(WEIGHTS):
        for layer in range(L):
            mine = sequence == number
            share = torch.bincount(experts[mine][:, layer].flatten(), minlength=E).double() / (ROWS[number] * K)
            expected += weight * E * float((share * logits[layer][mine].softmax(-1).mean(0)).sum()) / L
    assert abs(float(loss(np.arange(sum(ROWS)))) - expected) < 1e-12


def test_what_ranks_that_share_sequences_compute_adds_up_to_it() -> None:
    N = sum(ROWS)
    parts = [own_rows(N, rank, 3) for rank in range(3)]
    counts: list[torch.Tensor] = []
    for part in parts:
        loss(part, add_up=lambda x: (counts.append(x.clone()), x)[1])
    total = sum(counts)
    shared = sum(float(loss(part, add_up=lambda _: total)) for part in parts)
    assert abs(shared - float(loss(np.arange(N)))) < 1e-12
