"""FP8 as engines compute it, emulated: the same roundings, products in the model's own arithmetic.

A product of attention, feed-forward or experts takes its matrix from blocks of 128 x 128 (`shared.weights.blocks`) and its input
rounded to E4M3 with a scale per token and 128 numbers. Router, norms, embedding, head and `eh_proj` stay as they are.

Invariants
- What a token's input is rounded to depends on that token alone. A scale per tensor would depend on the batch that the token
  happens to be in: sampler and trainer would compute with different numbers.
- Division is IEEE's, not a product with the reciprocal: both sides round alike.
- A matrix is rounded under its published name, not as it is fused here.
- Gradients pass the rounding unchanged (straight-through).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shared.model.checkpoint import published_tensors
from shared.model.moe import MixtureOfExperts
from shared.model.network import DecoderLayer, Transformer
from shared.model.rounding import published
from shared.weights.blocks import LARGEST, from_blocks, is_fp8, to_blocks

GROUP = 128
LEAST = 1e-10  # of a group's largest number: SGLang's floor, so that zeros have a scale

Rounding = Callable[[Tensor], Tensor]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        return gradients[0], None


def per_token(x_NK: Tensor) -> Tensor:
    """[..., K] rounded to E4M3, a scale per row and 128 numbers of it (the last group may be shorter)."""
    K = x_NK.shape[-1]
    groups = nn.functional.pad(x_NK.detach(), (0, -K % GROUP)).unflatten(-1, (-1, GROUP)).float()
    rounded = _to_e4m3(groups, groups.abs().amax(-1, keepdim=True)).flatten(-2)[..., :K]
    return _through(x_NK, rounded)


def per_tensor(x_NK: Tensor) -> Tensor:
    """One scale for all: what not to do, kept to show it (`benchmarks.fp8`)."""
    values = x_NK.detach().float()
    return _through(x_NK, _to_e4m3(values, values.abs().max() if values.numel() else values.new_zeros(())))


def _to_e4m3(values: Tensor, largest: Tensor) -> Tensor:
    scale = largest.clamp(min=LEAST) / LARGEST
    return (values / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def _through(x: Tensor, rounded: Tensor) -> Tensor:
    found: Tensor = _StraightThrough.apply(x, rounded.to(x.dtype))
    return found


def round_weights(model: Transformer) -> None:
    """In place: every matrix that engines hold in FP8 takes the value that its blocks stand for. Rounding again changes nothing."""
    with torch.no_grad():
        for name, view in published_tensors(model).items():
            if is_fp8(name, view.ndim):
                view.copy_(from_blocks(*to_blocks(view)))


def round_inputs(model: Transformer, rounding: Rounding = per_token) -> Callable[[], None]:
    """From here on the inputs of those matrices are rounded. Returns what ends it."""
    handles = []
    experts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for layer in (module for module in model.modules() if isinstance(module, DecoderLayer)):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),)))
    for each in experts:
        each.rounding = rounding
    model.emulates_fp8 = True

    def end() -> None:
        for handle in handles:
            handle.remove()
        for each in experts:
            each.rounding = None
        model.emulates_fp8 = False

    return end


@contextlib.contextmanager
def published_in_fp8(model: Transformer, rounding: Rounding = per_token) -> Iterator[None]:
    """As `published`, for a policy that is sampled by engines in FP8: float32 masters, which come back bit for bit."""
    if (dtype := model.embed_tokens.weight.dtype) != torch.float32:
        raise ValueError(f"masters in {dtype}; allowed: torch.float32")
    with published(model):
        round_weights(model)
        end = round_inputs(model, rounding)
        try:
            yield
        finally:
            end()
