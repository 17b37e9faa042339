"""Muon for matrices, Adam for the rest; both sharded by rank where that saves time.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest semi-orthogonal matrix, by a quintic
Newton-Schulz iteration. Stacked experts [E, rows, columns] are orthogonalised one by one, batched. The iteration costs
as much as several hundred tokens of training per matrix, so every rank does its share and the updates are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """Singular values of [..., rows, columns] brought near 1."""
    a, b, c = _QUINTIC
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Nesterov momentum, then orthogonalisation. The step is scaled by sqrt(max(1, rows / columns))."""

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        self.parameters = list(parameters)
        self.lr, self.momentum = lr, momentum
        self.buffers = [torch.zeros_like(p) for p in self.parameters]
        self.owners = _shares([_cost(p) for p in self.parameters])

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """`scale` multiplies the learning rate. Gradients must be equal on all ranks."""
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        updates = []
        for parameter, buffer, owner in zip(self.parameters, self.buffers, self.owners, strict=True):
            assert parameter.grad is not None
            buffer.mul_(self.momentum).add_(parameter.grad)
            mine = owner % ranks == rank
            update = orthogonal(parameter.grad + self.momentum * buffer) if mine else torch.zeros_like(parameter)
            updates.append(update.flatten())
        flat = torch.cat(updates)
        if ranks > 1:
            dist.all_reduce(flat)
        parts = flat.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            rows, columns = parameter.shape[-2:]
            parameter.add_(part.view_as(parameter), alpha=-self.lr * scale * max(1.0, rows / columns) ** 0.5)


def _cost(parameter: nn.Parameter) -> int:
    return parameter.numel() * min(parameter.shape[-2:])


def _shares(costs: list[int], ranks: int = 2) -> list[int]:
    """Which rank (modulo) orthogonalises which matrix: the costliest first, to the least loaded."""
    load, owners = [0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


class MuonAdam:
    """One optimiser for a model. `frozen`: name prefixes that stay as they are."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float, frozen: tuple[str, ...] = ()) -> None:
        named = [(n, p) for n, p in model.named_parameters() if not n.startswith(frozen or ("\0",))]
        matrices = [p for n, p in named if p.ndim >= 2 and not _by_adam(n)]
        self.rest = [p for n, p in named if p.ndim < 2 or _by_adam(n)]
        self.muon = Muon(matrices, muon_lr)
        self.adam_lr = adam_lr
        self.adam = torch.optim.Adam(self.rest, lr=adam_lr, betas=(0.9, 0.95), fused=True)
        self.parameters = [*matrices, *self.rest]

    def step(self, scale: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.muon.step(scale)
        self.adam.step()

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Flat, for safetensors."""
        state = {f"muon.{i}": buffer for i, buffer in enumerate(self.muon.buffers)}
        for i, parameter in enumerate(self.rest):
            for name, value in self.adam.state.get(parameter, {}).items():
                state[f"adam.{i}.{name}"] = value
        return state

    def restore(self, state: dict[str, Tensor]) -> None:
        for i, buffer in enumerate(self.muon.buffers):
            buffer.copy_(state[f"muon.{i}"])
        for i, parameter in enumerate(self.rest):
            prefix = f"adam.{i}."
            found = {k.removeprefix(prefix): v.clone() for k, v in state.items() if k.startswith(prefix)}
            if found:
                self.adam.state[parameter] = found


def _by_adam(name: str) -> bool:
    """Embeddings and routers: their rows are directions of their own, not a linear map."""
    return "embed_tokens" in name or "lm_head" in name or name.endswith("gate.weight")


def average_gradients(parameters: Sequence[nn.Parameter], clip: float) -> float:
    """Mean over ranks, clipped to a global norm; returns the norm before."""
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in parameters])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
    norm = float(flat.norm())
    if norm > clip:
        flat *= clip / norm
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return norm
