"""The published form of a model's weights, read from the model itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from services.inference.live import Bits
from shared.model import Transformer, published_tensors
from shared.model.checkpoint import KEPT_IN_FLOAT32
from shared.weights import checksum
from shared.weights.torch_tensors import to_bits


def bits_of(model: Transformer) -> Bits:
    """bf16 bits, and float32 where a checkpoint keeps it."""
    tensors = published_tensors(model)
    return to_bits(tensors, keep_float32=frozenset(name for name in tensors if name.endswith(KEPT_IN_FLOAT32)))


class Checksum:
    """What weights hash to in their published form; of models of one shape.

    All of them are read by one call into memory that is there: the thread that samples holds the interpreter for most of the
    time, and whoever reads tensor by tensor waits for it at each."""

    def __init__(self, model: Transformer) -> None:
        tensors = published_tensors(model)
        self._read = [_copy(name, tensor) for name, tensor in tensors.items()]
        self._bits = {name: _numpy(copy) for name, copy in zip(tensors, self._read, strict=True)}

    def __call__(self, weights: Mapping[str, torch.Tensor]) -> str:
        """`weights`: of `published_tensors`."""
        torch._foreach_copy_(self._read, list(weights.values()))
        return checksum(self._bits)


def _copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=torch.float32 if name.endswith(KEPT_IN_FLOAT32) else torch.bfloat16)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    """A view: of bf16 its bits."""
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
