"""The policy gradient is the one on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from services.trainer import loss

S, D, V = 40, 8, 11


def test_advantages_are_rewards_minus_their_mean_and_nothing_else() -> None:
    assert loss.advantages([1, 0, 0, 1]).tolist() == [0.5, -0.5, -0.5, 0.5]
    assert loss.advantages([0.3, 0.3]).tolist() == [0.0, 0.0]
    nearly = loss.advantages([1.0, 0.999])
    assert np.allclose(nearly, [0.0005, -0.0005])  # no division by the standard deviation


def test_the_gradient_of_the_policy_loss_is_the_hand_derived_one() -> None:
    """d loss / d logp_t = -min(p/q, clip) (A - kl (log p - log ref)) / norm, weight and penalty held fixed."""
    rng = torch.Generator().manual_seed(0)
    logprobs, sampled, reference, advantage = (torch.randn(S, generator=rng).double() for _ in range(4))
    logprobs.requires_grad_()
    loss.policy_loss(logprobs, sampled, reference, advantage, clip=1.5, kl=0.3, norm=7.0).backward()
    p = logprobs.detach()
    weight = np.minimum(np.exp(p - sampled), 1.5)
    expected = -weight * (advantage - 0.3 * (p - reference)) / 7.0
    assert torch.allclose(logprobs.grad, expected)
    assert (weight == 1.5).any()


def test_with_a_floor_tokens_beyond_it_or_the_clip_have_no_loss_and_the_others_their_whole_weight() -> None:
    rng = torch.Generator().manual_seed(0)
    logprobs, sampled, reference, advantage = (torch.randn(S, generator=rng).double() for _ in range(4))
    logprobs[0] = sampled[0] + 1000.0  # its weight is no number
    logprobs.requires_grad_()
    loss.policy_loss(logprobs, sampled, reference, advantage, clip=1.5, floor=0.5, kl=0.3, norm=7.0).backward()
    kinds = set()
    for t in range(S):
        p, q = float(logprobs[t].detach()), float(sampled[t])
        outside = 1 if p - q > math.log(1.5) else -1 if p - q < math.log(0.5) else 0
        weight = 0.0 if outside else math.exp(p - q)
        expected = -weight * (float(advantage[t]) - 0.3 * (p - float(reference[t]))) / 7.0
        assert float(logprobs.grad[t]) == pytest.approx(expected, abs=1e-12)
        kinds.add(outside)
    assert kinds == {-1, 0, 1}


@pytest.mark.parametrize("rows", [1024, 7])
def test_token_logprobs_and_their_gradient_equal_the_plain_softmax(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(loss, "ROWS", rows)
    torch.manual_seed(0)
    hidden, head = torch.randn(S, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    targets, temperature, weight = torch.randint(V, (S,)), torch.rand(S) + 0.5, torch.randn(S)
    logprobs, entropy = loss.token_logprobs(hidden, head, targets, temperature)
    (logprobs * weight).sum().backward()
    found = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    log_p = (hidden @ head.T / temperature[:, None]).log_softmax(-1)
    plain = log_p.gather(1, targets[:, None])[:, 0]
    (plain * weight).sum().backward()
    assert torch.allclose(logprobs, plain, atol=1e-5)
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-4)
    assert torch.allclose(found[0], hidden.grad, atol=1e-5)
    assert torch.allclose(found[1], head.grad, atol=1e-5)


def test_following_is_soft_cross_entropy_and_moves_the_student_alone() -> None:
    torch.manual_seed(0)
    student, teacher, head = (torch.randn(n, D, requires_grad=True) for n in (S, S, V))
    (loss.follow_loss(student, teacher, head) / 3).backward()
    found = student.grad.clone()
    assert teacher.grad is None
    assert head.grad is None
    student.grad = None
    p = (teacher @ head.T).softmax(-1).detach()
    (-(p * (student @ head.detach().T).log_softmax(-1)).sum() / 3).backward()
    assert torch.allclose(found, student.grad, atol=1e-5)


def test_mismatch_is_zero_for_equal_policies_and_its_k3_is_never_negative() -> None:
    assert set(loss.mismatch(np.zeros(5)).values()) == {0.0}
    figures = loss.mismatch(np.random.default_rng(0).normal(size=1000))
    assert figures["k3"] > 0
    assert figures["log_ratio_p50"] < figures["log_ratio_p99"] < figures["log_ratio_max"]
    assert loss.mismatch(np.zeros(0)) == {}


def test_logits_of_bf16_operands_are_not_rounded_and_the_heads_gradient_is_summed_in_float32() -> None:
    """Against float64 of the same bf16 numbers. Rounded to bf16, a logit of 20 is wrong by up to 0.06."""
    torch.manual_seed(0)
    rows = 3 * loss.ROWS
    exact = (4 * torch.randn(rows, D, dtype=torch.float64)).bfloat16().double().requires_grad_()
    exact_head = torch.randn(V, D, dtype=torch.float64).bfloat16().double().requires_grad_()
    hidden, head = (x.detach().bfloat16().requires_grad_() for x in (exact, exact_head))
    targets, temperature = torch.randint(V, (rows,)), torch.ones(rows)
    logprobs, entropy = loss.token_logprobs(hidden, head, targets, temperature)
    expected = (exact @ exact_head.T).log_softmax(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected.gather(1, targets[:, None])[:, 0], atol=1e-4)
    logprobs.sum().backward()
    expected.gather(1, targets[:, None]).sum().backward()
    assert head.grad is not None
    assert exact_head.grad is not None
    assert float((head.grad.double() - exact_head.grad).abs().max() / exact_head.grad.abs().max()) < 0.004
    follow = loss.follow_loss(hidden, hidden.detach(), head)
    entropies = -(expected.detach().exp() * expected.detach()).sum()
    assert float(follow.detach()) == pytest.approx(float(entropies), rel=1e-5)
