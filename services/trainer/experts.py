"""Expert parallelism: each rank of a group holds a part of every layer's experts.

A layer sends each token's row to the ranks that hold its experts, and they send the results back: two all-to-alls around the
grouped product, two more in the backward pass. The router, replayed routing and the roundings of a row stay with the token's rank.
The order of the rows that an expert gets is that of their ranks, then that of their tokens.

The MTP layers keep all their experts on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.mesh import Mesh
from shared.model import Transformer
from shared.model.moe import MixtureOfExperts, permuted


class Experts:
    """The ranks among which experts are divided, as one of them sees them. `group`: those that hold all experts together; `data`:
    those that hold the same. None: the division is of one rank, or `data` is the whole world."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.group = _own_group(mesh, mesh.expert_groups) if self.divided else None
        self.data = _own_group(mesh, mesh.expert_data_groups) if self.divided else None

    @property
    def divided(self) -> bool:
        return self.mesh.expert > 1

    @property
    def data_ranks(self) -> int:
        """How many ranks hold the same experts."""
        return self.mesh.world // self.mesh.expert

    def divide(self, model: Transformer) -> None:
        """Let the trunk's layers keep this rank's experts alone. Raises BadMesh."""
        if not self.divided:
            return
        self.mesh.check_experts(model.config.moe.num_experts if model.config.moe else 0)
        for layer in layers(model):
            each = len(layer.own) // self.mesh.expert
            first = self.mesh.expert_rank * each
            layer.keep(range(first, first + each), self.exchange)

    def slice(self, whole: Tensor) -> Tensor:
        """Return this rank's experts of a stack of all: [E, ...]."""
        return whole.chunk(self.mesh.expert)[self.mesh.expert_rank]

    def collect(self, own: Tensor) -> Tensor:
        """Return the stack of all experts [E, ...] on rank 0, on the host; elsewhere what was given. Every rank calls it."""
        if not self.divided or self.mesh.rank >= self.mesh.expert:  # rank 0's own group has them all
            return own
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.mesh.expert)] if self.mesh.rank == 0 else None
        dist.gather(own, parts, dst=0, group=self.group)
        return own if parts is None else torch.cat([part.cpu() for part in parts])

    def exchange(self, x_MD: Tensor, ends_E: Tensor, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See shared.model.moe.Exchange."""
        ranks = self.mesh.expert
        sent = ends_E.diff(prepend=ends_E.new_zeros(1)).view(ranks, -1).long()  # [rank, its expert]
        received = torch.empty_like(sent)  # [rank, own expert]
        dist.all_to_all_single(received, sent, group=self.group)
        going, coming = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = _AllToAll.apply(x_MD, going, coming, self.group)
        own = torch.arange(received.shape[1], device=x_MD.device).repeat(ranks)
        order = own.repeat_interleave(received.flatten()).argsort(stable=True)  # by rank and expert, to expert and rank
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out = compute(permuted(rows, order, back), received.sum(0).cumsum(0).int())
        result: Tensor = _AllToAll.apply(permuted(out, back, order), coming, going, self.group)
        return result


class _AllToAll(torch.autograd.Function):
    """Rows in the order of the ranks that get them, `going[r]` to rank r; `coming[r]` come from it. The gradient goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, going: list[int], coming: list[int], group: Any) -> Tensor:
        ctx.ways = going, coming, group
        return _send(x, going, coming, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        going, coming, group = ctx.ways
        return _send(gradients[0], coming, going, group), None, None, None


def _send(x: Tensor, going: list[int], coming: list[int], group: Any) -> Tensor:
    found = x.new_empty(sum(coming), *x.shape[1:])
    dist.all_to_all_single(found, x.contiguous(), coming, going, group=group)
    return found


def layers(model: Transformer) -> list[MixtureOfExperts]:
    """The trunk's MoE layers."""
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)]


def _own_group(mesh: Mesh, groups: Sequence[list[int]]) -> Any:
    """Every rank makes all groups, in the same order."""
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return next(group for ranks, group in made if mesh.rank in ranks)
