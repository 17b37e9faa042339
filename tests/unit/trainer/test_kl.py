"""The KL penalty's two forms against exact enumeration: every sequence of a tiny vocabulary, by a policy that is a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.loss import policy_loss, to_go

V, T = 3, 3
SEQUENCES = list(itertools.product(range(V), repeat=T))
PREFIXES = [prefix for t in range(T) for prefix in itertools.product(range(V), repeat=t)]


def table(seed: int) -> Tensor:
    """Return logits for every prefix: float64 [prefixes, V]."""
    return torch.randn(len(PREFIXES), V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logprobs(logits: Tensor) -> Tensor:
    """Return the log-probability of each token of each sequence: [sequences, T]."""
    rows = logits.log_softmax(-1)
    return torch.stack([torch.stack([rows[PREFIXES.index(s[:t]), s[t]] for t in range(T)]) for s in SEQUENCES])


def penalty(policy: Tensor, reference: Tensor, charge: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the expected gradient of the loss with rewards of zero: each sequence by its probability."""
    found, base = logprobs(policy), logprobs(reference)
    total = torch.zeros((), dtype=torch.float64)
    for own, other in zip(found, base, strict=True):
        loss = policy_loss(own, own.detach(), other, torch.zeros(T), clip=2.0, kl=1.0, norm=1.0, charge=charge)
        total = total + own.detach().sum().exp() * loss
    (gradient,) = torch.autograd.grad(total, policy)
    return gradient


def the_rest(k1_S: Tensor) -> Tensor:
    return torch.as_tensor(to_go(k1_S.numpy(), [len(k1_S)]))


def test_charged_to_go_it_is_the_gradient_of_the_sequences_kl() -> None:
    policy, reference = table(0).requires_grad_(), table(1)
    sums, base = logprobs(policy).sum(1), logprobs(reference).sum(1)
    (expected,) = torch.autograd.grad((sums.exp() * (sums - base)).sum(), policy)
    assert torch.allclose(penalty(policy, reference, the_rest), expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(penalty(policy, reference, None), expected, rtol=1e-2)


def test_charged_by_token_it_is_the_gradient_of_the_states_kls_with_the_states_held_fixed() -> None:
    policy, reference = table(2).requires_grad_(), table(3)
    found = logprobs(policy).detach()
    rows, base = policy.log_softmax(-1), reference.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for number, prefix in enumerate(PREFIXES):
        reached = next(
            found[i, : len(prefix)].sum().exp() for i, s in enumerate(SEQUENCES) if s[: len(prefix)] == prefix
        )
        total = total + reached * (rows[number].exp() * (rows[number] - base[number])).sum()
    (expected,) = torch.autograd.grad(total, policy)
    assert torch.allclose(penalty(policy, reference, None), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lengths", [[5], [1, 4], [2, 0, 3], [1, 1, 1, 1, 1], []])
def test_a_token_pays_for_itself_and_what_follows_in_its_own_sequence(lengths: list[int]) -> None:
    values = np.random.default_rng(0).normal(size=sum(lengths))
    expected, start = [], 0
    for length in lengths:
        expected += [values[start + i : start + length].sum() for i in range(length)]
        start += length
    assert to_go(values, lengths) == pytest.approx(expected)
