"""Feed-forward layers: dense, and a mixture of experts whose routing can be recorded and replayed.

Router scores are computed in float32 at least. Expert weights are stacked: `gate_up` [E, 2I, D] (gate rows first) and
`down` [E, D, I]. Tokens are sorted by expert and multiplied group by group (`F.grouped_mm`, differentiable, the fastest
of the forms measured on a CPU from 16 to 8,192 tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.model.config import ModelConfig, Moe
from shared.model.fused import fused


@dataclass(frozen=True, slots=True)
class Replay:
    """Routing that the engine recorded, to be used instead of the model's own selection.

    experts_NLK: int64, L MoE layers of the trunk. valid_N: rows without a record (the last token of a segment) route
    themselves. tau in 0..1: a replayed expert stays if its raw score is at least tau times the smallest raw score in
    the router's own selection; else the router's best candidate not already present takes its place. 0 keeps all.
    """

    experts_NLK: Tensor
    valid_N: Tensor
    tau: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerReplay:
    experts_NK: Tensor
    valid_N: Tensor
    tau: float


@dataclass(slots=True)
class Routing:
    """What one MoE layer used. `logits_NE` has its graph (for a balancing loss); `replaced` counts filtered experts."""

    experts_NK: Tensor
    logits_NE: Tensor
    replaced: Tensor | int


class Exchange(Protocol):
    """Sends rows to the processes that hold their experts, and the results back.

    `x_MD`: rows sorted by expert. `ends_E`: int32, where each expert's rows end, over all experts. `compute(x_RD, ends_O)`
    computes rows sorted by expert, over this process's own. Returns a row for each of `x_MD`, in its order. Gradients go the
    same way back. Every process that holds a part of the experts calls it equally often, with any number of rows."""

    def __call__(self, x_MD: Tensor, ends_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor: ...


class Mlp(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)  # gate rows, then up rows
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_up_proj(x_ND)))


@fused
def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of [..., 2I] with the gate first."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class Router(nn.Module):
    """Scores, selection and gate weights. Softmax over all experts, or sigmoid with a correction bias that acts on the
    selection alone and a limit to the best `topk_group` of `n_group` groups (a group counts its two best)."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, hidden))
        if moe.scoring == "sigmoid":
            self.register_buffer("e_score_correction_bias", torch.zeros(moe.num_experts))

    def forward(self, x_ND: Tensor, replay: LayerReplay | None) -> tuple[Tensor, Routing]:
        """Returns gate weights [N, K] in x's type, and the routing."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        logits = F.linear(x_ND.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if self.moe.scoring == "softmax" else logits.sigmoid()
        with torch.no_grad():
            experts, replaced = self._select(scores.detach(), replay)
        weights = scores.gather(1, experts)
        if self.moe.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.moe.routed_scaling_factor != 1.0:
            weights = weights * self.moe.routed_scaling_factor
        return weights.to(x_ND.dtype), Routing(experts, logits, replaced)

    def _select(self, scores: Tensor, replay: LayerReplay | None) -> tuple[Tensor, Tensor | int]:
        K = self.moe.num_experts_per_tok
        candidates = self._candidates(scores)
        own = candidates.topk(K, -1).indices
        if replay is None:
            return own, 0
        valid = replay.valid_N[:, None]
        if replay.tau == 0:
            return torch.where(valid, replay.experts_NK, own), 0
        chosen = torch.where(valid, replay.experts_NK, own)
        floor = replay.tau * scores.gather(1, own).amin(-1, keepdim=True)
        keep = scores.gather(1, chosen) >= floor
        keep |= ~valid
        replaced = (~keep).sum()
        # Fill the i-th gap with the i-th best candidate that is not kept.
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, keep)
        fill = candidates.masked_fill(taken, -torch.inf).topk(K, -1).indices
        rank = ((~keep).cumsum(-1) - 1).clamp(min=0)
        return torch.where(keep, chosen, fill.gather(1, rank)), replaced

    def _candidates(self, scores: Tensor) -> Tensor:
        """What the selection ranks: the scores with correction bias and group mask."""
        moe = self.moe
        if moe.scoring == "softmax":
            return scores
        biased = scores + self.e_score_correction_bias
        if moe.n_group == 1:
            return biased
        grouped = biased.view(len(scores), moe.n_group, moe.num_experts // moe.n_group)
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(moe.topk_group, -1).indices
        allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, best, True)
        return grouped.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)


class MixtureOfExperts(nn.Module):
    expert_ends: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        moe, D = config.moe, config.hidden_size
        self.own = range(moe.num_experts)  # experts whose weights are here
        self.exchange: Exchange | None = None  # with those that hold the others; None: all are here
        self.gate = Router(D, moe)
        self.gate_up = nn.Parameter(torch.empty(moe.num_experts, 2 * moe.intermediate_size, D))
        self.down = nn.Parameter(torch.empty(moe.num_experts, D, moe.intermediate_size))
        self.register_buffer("expert_ends", torch.arange(1, moe.num_experts + 1), persistent=False)
        self.rounding: Callable[[Tensor], Tensor] | None = None  # of the experts' inputs: shared.model.fp8
        # Or one that rounds its input itself: shared.model.grouped_fp8.
        self.product: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_linear
        self.shared_experts = Mlp(D, moe.intermediate_size * moe.n_shared_experts) if moe.n_shared_experts else None

    def forward(self, x_ND: Tensor, replay: LayerReplay | None = None) -> tuple[Tensor, Routing]:
        weights_NK, routing = self.gate(x_ND, replay)
        K = weights_NK.shape[1]
        # Stable: equal input, equal order of summation.
        experts, order = routing.experts_NK.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, self.expert_ends, out_int32=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        rows = _Dispatch.apply(self._rounded(x_ND), order, back, K)
        out = self._apply_own(rows, ends) if self.exchange is None else self.exchange(rows, ends, self._apply_own)
        out = out * permuted(weights_NK.flatten(), order, back)[:, None]
        out = permuted(out, back, order).unflatten(0, (-1, K)).sum(1)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x_ND)
        return out, routing

    def keep(self, own: range, exchange: Exchange) -> None:
        """Forget the weights of all experts but `own`, an unbroken range. `exchange` reaches the others."""
        for name in ("gate_up", "down"):
            setattr(self, name, nn.Parameter(getattr(self, name).detach()[own.start : own.stop].clone()))
        self.own, self.exchange = own, exchange

    def _apply_own(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        return self.product(self._rounded(gated(self.product(x_MD, self.gate_up, ends_E))), self.down, ends_E)

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.rounding is None else self.rounding(x)


class _Permuted(torch.autograd.Function):
    """rows[order], for a permutation and its inverse `back`. The gradient is grad[back]. Autograd would add it up row by row, on
    CUDA in an order that differs from run to run: a resume would not be bit-equal."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back), None, None


def permuted(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Return rows[order]. `back`: the inverse permutation."""
    found: Tensor = _Permuted.apply(rows, order, back)
    return found


class _Dispatch(torch.autograd.Function):
    """Each row K times, in the order of experts. The gradient of a row is the sum over its K copies, in the order of its
    selection, for the same reason."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order: Tensor, back: Tensor, K: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.K = K
        return x_ND.index_select(0, order // K)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return gradients[0].index_select(0, back).unflatten(0, (-1, ctx.K)).sum(1), None, None, None


def grouped_linear(x_MD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to ends_E[0] by the first expert's matrix, up to ends_E[1] by the second's, … Returns [M, O]."""
    if x_MD.dtype == torch.float64:  # grouped_mm has no float64, which exact gradient tests want
        parts = x_MD.tensor_split(ends_E[:-1].tolist())
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weight_EOD.unbind(), strict=True)])
    return F.grouped_mm(x_MD, weight_EOD.transpose(1, 2), offs=ends_E)


def load_balancing_loss(router_logits: list[Tensor], experts_NLK: Tensor, valid_N: Tensor | None = None) -> Tensor:
    """Switch-Transformer balancing, mean over layers: E * sum_e (share of assignments to e) * (mean probability of e).

    1 when balanced, E when all go to one expert. `router_logits`: [N, E] per MoE layer, with their graph.
    """
    losses = []
    for layer, logits in enumerate(router_logits):
        experts, probabilities = experts_NLK[:, layer], logits.softmax(-1)
        if valid_N is not None:
            experts, probabilities = experts[valid_N], probabilities[valid_N]
        E = logits.shape[1]
        share = torch.bincount(experts.flatten(), minlength=E).float() / experts.numel()
        losses.append(E * (share * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()
