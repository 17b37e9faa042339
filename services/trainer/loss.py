"""The policy gradient: Dr. GRPO advantages, importance weights, a k1 penalty, mismatch statistics.

Pure functions of tensors (docs/recipe.md, "Policy gradient"). S: sampled tokens of a micro-batch, D: hidden size, V: words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.model.fused import compiled, is_half_on_cuda

ROWS = 1024  # rows of logits held at a time; [ROWS, V] in float32 stays small for any vocabulary
# On CUDA: more where they fit into 2 GiB. The head's gradient, of [V, D], is read and written for each block of rows.
CUDA_LOGITS = 1 << 29


def advantages(rewards: Sequence[float]) -> np.ndarray:
    """Dr. GRPO: A_i = r_i - mean_j r_j over the group. Not divided by the standard deviation: with all attempts nearly
    equally right that would blow up small differences of behaviour."""
    r = np.asarray(rewards, np.float64)
    return (r - r.mean()).astype(np.float32)


def importance(log_ratio_S: Tensor, *, clip: float, floor: float = 0.0) -> Tensor:
    """Weights p_trainer / p_sampler, truncated at `clip`. With a `floor` above 0 the double-sided mask instead: beyond
    [floor, clip] a token weighs nothing, for what the two disagree on so much says little of either."""
    ratio_S = log_ratio_S.exp()
    if floor > 0:
        return torch.where((ratio_S >= floor) & (ratio_S <= clip), ratio_S, 0.0)
    return ratio_S.clamp(max=clip)


def to_go(values_S: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return for each value the sum of it and of all later ones of its sequence: float64 [S]. `lengths`: of the sequences, one
    after the other; they add up to S."""
    later = np.append(np.cumsum(values_S[::-1], dtype=np.float64)[::-1], 0.0)
    return later[:-1] - np.repeat(later[np.cumsum(lengths, dtype=np.int64)], lengths)


def policy_loss(
    logprobs_S: Tensor,
    sampled_logprobs_S: Tensor,
    reference_logprobs_S: Tensor | None,
    advantage_S: Tensor,
    *,
    clip: float,
    floor: float = 0.0,
    kl: float,
    norm: float,
    charge: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Dr. GRPO with importance weights (see there) and a k1 penalty; a scalar. All inputs float32 [S], sampled tokens only.

    `sampled_logprobs` are the sampler's, `norm` the constant of the global batch (norm_tokens x attempts), so that the
    sum over micro-batches is the loss of the step. The penalty log q - log p acts detached, on the return: differentiated
    as a loss term its expected gradient would be zero. `reference_logprobs` is needed only if kl > 0.
    `charge`: what each token pays, from each token's log q - log p [S]; None: its own, which is the gradient of the sum of the
    states' KLs with the states held fixed. With `to_go` it is the gradient of the sequence's KL.
    """
    weight_S = importance(logprobs_S.detach() - sampled_logprobs_S, clip=clip, floor=floor)
    if kl > 0:
        assert reference_logprobs_S is not None
        k1_S = logprobs_S.detach() - reference_logprobs_S
        advantage_S = advantage_S - kl * (k1_S if charge is None else charge(k1_S))
    return -(weight_S * advantage_S * logprobs_S).sum() / norm


def supervised_loss(logprobs_S: Tensor, weight_S: Tensor, *, norm: float) -> Tensor:
    """Weighted negative log-likelihood, a scalar: the policy's loss with advantage `weight_S` and importance weight 1. Inputs
    float32 [S], in nats."""
    return -(weight_S * logprobs_S).sum() / norm


def nothing(parameters: Iterable[Tensor]) -> Tensor:
    """Return a loss of zero, a scalar, whose gradient is zero for each of these parameters. A rank takes part in a reduction with
    it, and ZeRO wants a backward before every step."""
    return sum((p.sum() * 0.0 for p in parameters), torch.zeros(()))


def _wide(x: Tensor) -> Tensor:
    """At least float32: a softmax over bf16 logits would lose the small probabilities."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """Return logits of at least float32. bf16 operands are multiplied as they are, and their products are summed and kept in
    float32: rounded to bf16, a logit of 20 is wrong by up to 0.06."""
    return _product(hidden, head.T)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == _wide(a[:0]).dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else _wide(a) @ _wide(b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b. The total may be wider than the operands."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(_product(a, b))


def _block(hidden: Tensor, head: Tensor) -> int:
    """Return how many rows of logits are held at a time."""
    return max(ROWS, CUDA_LOGITS // len(head) // ROWS * ROWS) if hidden.is_cuda else ROWS


@compiled
def _statistics(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (log-probabilities of the targets, entropies, log of the normaliser, greatest logits), reading the logits and writing
    nothing else. The greatest is taken away before the temperature divides, which would round what is left of the differences."""
    best = logits.amax(-1)
    logits = (logits - best[:, None]) / temperature[:, None]
    log_z = logits.logsumexp(-1)
    entropy = log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)
    return logits.gather(1, targets[:, None])[:, 0] - log_z, entropy, log_z, best


@compiled
def _slope(
    logits: Tensor, targets: Tensor, temperature: Tensor, log_z: Tensor, best: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return (one at the target - softmax) * scale, the gradient with respect to the logits before the temperature."""
    p = ((logits - best[:, None]) / temperature[:, None] - log_z[:, None]).exp()
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return ((hit.to(p.dtype) - p) * scale).to(dtype)


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(hidden @ head.T / temperature) at the targets, a block of rows at a time, forward and backward: the
    [S, V] matrix never exists. Logits are computed twice instead."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_z, best = (_wide(hidden[:0]).new_empty(len(hidden)) for _ in range(4))
        size = _block(hidden, head)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            logits = _logits(hidden[rows], head)
            if is_half_on_cuda(hidden):
                found = _statistics(logits, targets[rows], temperature[rows])
                logprobs[rows], entropy[rows], log_z[rows], best[rows] = found
                continue
            best[rows] = logits.amax(-1)
            logits.sub_(best[rows, None]).div_(temperature[rows, None])
            log_z[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, targets[rows, None])[:, 0] - log_z[rows]
            p = (logits - log_z[rows, None]).exp_()
            entropy[rows] = log_z[rows] - p.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, head, targets, temperature, log_z, best)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, head, targets, temperature, log_z, best = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head = head.new_zeros(head.shape, dtype=_wide(head[:0]).dtype) if ctx.needs_input_grad[1] else None
        size = _block(hidden, head)
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            scale = (grad[rows] / temperature[rows])[:, None]
            logits = _logits(hidden[rows], head)
            if is_half_on_cuda(hidden):
                of = (targets[rows], temperature[rows], log_z[rows], best[rows])
                d = _slope(logits, *of, scale, hidden.dtype)
            else:
                logits.sub_(best[rows, None]).div_(temperature[rows, None])
                d = logits.sub_(log_z[rows, None]).exp_().mul_(-scale)
                d.scatter_add_(1, targets[rows, None], scale)
                d = d.to(hidden.dtype)
            torch.mm(d, head, out=grad_hidden[rows])
            if grad_head is not None:
                _add_product(grad_head, d.T, hidden[rows])
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None


def token_logprobs(
    hidden_SD: Tensor, head_VD: Tensor, targets_S: Tensor, temperature_S: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the targets [S], entropies [S] in nats, no gradient), under the sampling temperature."""
    return _TokenLogprobs.apply(hidden_SD, head_VD, targets_S, temperature_S)


class _FollowLoss(torch.autograd.Function):
    """Soft cross-entropy -sum_v p_v log q_v, summed over rows; p from `teacher`, q from `student`, same head. The
    gradient (q - p) @ head is known in the forward pass already and kept instead of the logits."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        total = torch.zeros((), dtype=_wide(student[:0]).dtype, device=student.device)
        grad = torch.empty_like(student)
        for start in range(0, len(student), ROWS):
            rows = slice(start, start + ROWS)
            p = _logits(teacher[rows], head).softmax(-1)
            log_q = _logits(student[rows], head).log_softmax(-1)
            total -= (p * log_q).sum()
            torch.mm(log_q.exp_().sub_(p).to(student.dtype), head, out=grad[rows])
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * scale, None, None


def follow_loss(student_SD: Tensor, teacher_SD: Tensor, head_VD: Tensor) -> Tensor:
    """MTP self-distillation, summed over S: the student's hidden states match the distribution that the main head gives
    for the teacher's. Teacher and head are detached here: nothing but the MTP layers ever moves."""
    return _FollowLoss.apply(student_SD, teacher_SD.detach(), head_VD.detach())


def mismatch(log_ratio_S: np.ndarray) -> dict[str, float]:
    """How far trainer and sampler disagree: log_ratio = log p_trainer - log p_sampler of sampled tokens.

    k3 = mean(r - 1 - log r), the low-variance estimate of KL(sampler || trainer); quantiles of |log ratio|.
    """
    if not len(log_ratio_S):
        return {}
    size = np.abs(log_ratio_S)
    p50, p99 = np.quantile(size, (0.5, 0.99))
    k3 = float(np.mean(np.expm1(log_ratio_S) - log_ratio_S))
    return {"k3": k3, "log_ratio_p50": float(p50), "log_ratio_p99": float(p99), "log_ratio_max": float(size.max())}
