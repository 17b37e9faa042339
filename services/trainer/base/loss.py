"""Losses of the three phases, on right-padded rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.trainer.base.samples import Weight
from shared.model import Output, Transformer, causal_rows, load_balancing_loss

BALANCE = 0.01  # of the router's load-balancing loss, as in Switch Transformer


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over weighted positions, for means over any number of batches and ranks."""

    action_nll: float = 0.0
    actions: int = 0
    context_nll: float = 0.0
    contexts: int = 0
    exact: int = 0  # samples whose action tokens are all the likeliest ones
    samples: int = 0


def _run(model: Transformer, tokens_BT: Tensor) -> tuple[Output, Tensor]:
    B, T = tokens_BT.shape
    positions_N = torch.arange(T).repeat(B)
    return model(tokens_BT.flatten(), positions_N, causal_rows(B, T)), positions_N


def language_loss(
    model: Transformer, tokens_BT: Tensor, classes_BT: Tensor, context_weight: float
) -> tuple[Tensor, Figures]:
    """Weighted mean of the next-token loss, plus balancing. Logits are computed at weighted positions only."""
    inputs, targets, classes = tokens_BT[:, :-1], tokens_BT[:, 1:].flatten(), classes_BT[:, 1:].flatten()
    out, _ = _run(model, inputs)
    weight_of = torch.tensor([0.0, context_weight, 1.0])
    weights = weight_of[classes]
    at = weights.nonzero()[:, 0]
    nll = F.cross_entropy(model.logits(out.hidden_ND[at]), targets[at], reduction="none")
    loss = (nll * weights[at]).sum() / weights[at].sum().clamp(min=1.0)
    action = classes[at] == Weight.action
    detached = nll.detach()
    figures = Figures(
        action_nll=float(detached[action].sum()),
        actions=int(action.sum()),
        context_nll=float(detached[~action].sum()),
        contexts=int((~action).sum()),
        samples=len(tokens_BT),
    )
    if out.router_logits:
        loss = loss + BALANCE * load_balancing_loss(out.router_logits, out.experts_NLK)
    return loss, figures


@torch.no_grad()
def evaluate_rows(model: Transformer, tokens_BT: Tensor, classes_BT: Tensor) -> Figures:
    """Teacher-forced: losses, and how many samples have every action token as the likeliest one."""
    inputs, targets, classes = tokens_BT[:, :-1], tokens_BT[:, 1:], classes_BT[:, 1:]
    out, _ = _run(model, inputs)
    logits = model.logits(out.hidden_ND)
    nll = F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)
    right = (logits.argmax(-1).view_as(targets) == targets) | (classes != Weight.action)
    has_action = (classes == Weight.action).any(1)
    return Figures(
        action_nll=float(nll[classes == Weight.action].sum()),
        actions=int((classes == Weight.action).sum()),
        context_nll=float(nll[classes == Weight.context].sum()),
        contexts=int((classes == Weight.context).sum()),
        exact=int((right.all(1) & has_action).sum()),
        samples=int(has_action.sum()),
    )


def distillation_loss(model: Transformer, tokens_BT: Tensor, classes_BT: Tensor) -> tuple[Tensor, float]:
    """MTP self-distillation: at position t the MTP layer reads (h_t, x_{t+1}) and matches the main head's distribution
    at t + 1, that of x_{t+2}. Soft cross-entropy against detached logits; also returns how often the likeliest tokens
    agree, the acceptance rate of greedy speculative decoding with one draft token."""
    B, T = tokens_BT.shape
    with torch.no_grad():
        out, positions_N = _run(model, tokens_BT)
        classes = classes_BT.roll(-2, 1)
        classes[:, -2:] = Weight.none
        at = (classes.flatten() != Weight.none).nonzero()[:, 0]
        target = model.logits(out.hidden_ND[at + 1]).softmax(-1)
        next_N = tokens_BT.roll(-1, 1).flatten()
    hidden_ND = model.mtp(out.residual_ND, next_N, positions_N, causal_rows(B, T))
    logits = model.mtp_logits(hidden_ND[at])
    loss = -(target * logits.log_softmax(-1)).sum(-1).mean()
    agreement = float((logits.detach().argmax(-1) == target.argmax(-1)).float().mean())
    return loss, agreement
