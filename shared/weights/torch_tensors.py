"""The one place where weights meet torch: bf16 torch tensors to their bits and back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from shared.weights.manifest import Tensors


def to_bits(
    tensors: Mapping[str, torch.Tensor], *, keep_float32: frozenset[str] = frozenset()
) -> dict[str, np.ndarray]:
    """bf16 bits (uint16) of every tensor, rounded to nearest even if it is wider; names in `keep_float32` stay float32.

    The result never shares memory with the input: a published version must not change under a later optimiser step.
    """
    result: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        host = tensor.detach().to("cpu")
        if name in keep_float32:
            result[name] = host.to(torch.float32).contiguous().numpy().copy()
        else:
            rounded = host.to(torch.bfloat16).contiguous()
            result[name] = rounded.view(torch.int16).numpy().view(np.uint16).copy()
    return result


def from_bits(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Inverse of `to_bits`: bf16 (or float32) torch tensors that own their memory."""
    result: dict[str, torch.Tensor] = {}
    for name, array in tensors.items():
        if array.dtype == np.uint16:
            result[name] = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        else:
            result[name] = torch.from_numpy(array.copy())
    return result
