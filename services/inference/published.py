"""A model's weights in their published form."""

from __future__ import annotations

from services.inference.live import Bits
from shared.model import Transformer, published_tensors
from shared.model.checkpoint import KEPT_IN_FLOAT32
from shared.weights.torch_tensors import to_bits


def bits_of(model: Transformer) -> Bits:
    """The published form of a model's weights: bf16 bits, and float32 where a checkpoint keeps it."""
    tensors = published_tensors(model)
    return to_bits(tensors, keep_float32=frozenset(name for name in tensors if name.endswith(KEPT_IN_FLOAT32)))
