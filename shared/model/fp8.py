"""FP8, MXFP8 and NVFP4 as engines compute them, emulated: the same roundings, products in the model's own arithmetic.

A product of attention, feed-forward or experts takes a rounded matrix (`shared.weights.low_precision`) and a rounded input. Router,
norms, embedding, head and `eh_proj` stay as they are. What inputs are rounded to:

- fp8: E4M3 with a scale per token and 128 numbers;
- mxfp8: E4M3 with a power of two per token and 32 numbers;
- nvfp4: E2M1 with an E4M3 scale per token and 16 numbers, and a float32 scale per token. Hardware has one per tensor; a token's
  numbers would depend on its batch.

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
from shared.model.moe import MixtureOfExperts, grouped_linear
from shared.model.network import DecoderLayer, Transformer
from shared.model.rounding import published
from shared.weights.blocks import LARGEST, is_fp8
from shared.weights.low_precision import Format, round_matrix
from shared.weights.microscale import from_mxfp8, from_nvfp4, to_mxfp8, to_nvfp4

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


def per_token_mxfp8(x_NK: Tensor) -> Tensor:
    """[..., K] rounded to E4M3, a power of two per row and 32 numbers of it."""
    return _through(x_NK, from_mxfp8(*to_mxfp8(x_NK.detach())))


def per_token_nvfp4(x_NK: Tensor) -> Tensor:
    """[..., K] rounded to E2M1, a scale per row and 16 numbers of it, and one per row."""
    return _through(x_NK, from_nvfp4(*to_nvfp4(x_NK.detach(), by_row=True)))


INPUTS: dict[Format, Rounding] = {"fp8": per_token, "mxfp8": per_token_mxfp8, "nvfp4": per_token_nvfp4}


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


def round_weights(model: Transformer, format: Format = "fp8") -> None:
    """In place: every matrix that engines hold in the format takes the value that its blocks stand for. Rounding again changes
    nothing, but for nvfp4."""
    with torch.no_grad():
        for name, view in published_tensors(model).items():
            if is_fp8(name, view.ndim):
                view.copy_(round_matrix(view, format))


def round_inputs(model: Transformer, format: Format = "fp8", rounding: Rounding | None = None) -> Callable[[], None]:
    """From here on the inputs of those matrices are rounded as the format is, or by `rounding`. Returns what ends it."""
    fused = _fused() if format == "fp8" and rounding is None else None
    rounding = rounding or INPUTS[format]
    handles = []
    experts = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    for layer in (module for module in model.modules() if isinstance(module, DecoderLayer)):
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                handles.append(module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),)))
    for each in experts:
        if fused is not None and each.down.is_cuda:
            each.product = fused
        else:
            each.rounding = rounding
    model.emulates = format

    def end() -> None:
        for handle in handles:
            handle.remove()
        for each in experts:
            each.rounding, each.product = None, grouped_linear
        model.emulates = None

    return end


def _fused() -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the grouped product that rounds its input in FP8 as it reads it. None: there is no Triton."""
    try:
        from shared.model.grouped_fp8 import grouped_linear_fp8
    except ImportError:
        return None
    return grouped_linear_fp8


@contextlib.contextmanager
def published_in_fp8(
    model: Transformer,
    format: Format = "fp8",
    rounding: Rounding | None = None,
    arithmetic: torch.dtype = torch.float32,
) -> Iterator[None]:
    """As `published`, for a policy that is sampled by engines in the format: float32 masters, which come back bit for bit."""
    if (dtype := model.embed_tokens.weight.dtype) != torch.float32:
        raise ValueError(f"masters in {dtype}; allowed: torch.float32")
    with published(model, arithmetic):
        round_weights(model, format)
        end = round_inputs(model, format, rounding)
        try:
            yield
        finally:
            end()
