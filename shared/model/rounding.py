"""The forward uses exactly the bf16 values that are published; the optimiser keeps float32 masters.

Inside `with published(model):` every parameter holds its bf16-rounded value, so forward and backward run on what the
engines serve, and the gradient with respect to the rounded weight lands in `.grad` of the master (straight-through).
No autograd node is added; the cost is one rounding of the weights per entry.

With `arithmetic` bfloat16 the parameters are bf16 tensors in the block, and so are all activations. Their gradients are still
accumulated in float32, micro-batch after micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


def round_bf16(tensor: Tensor) -> Tensor:
    """The nearest bf16 value (ties to even), in the type of `tensor`."""
    return tensor.to(torch.bfloat16).to(tensor.dtype)


@contextlib.contextmanager
def published(model: nn.Module, arithmetic: torch.dtype = torch.float32) -> Iterator[None]:
    """Forward *and* backward must both run inside; the optimiser steps outside. Entering twice is harmless: rounding is
    idempotent. The masters come back bit for bit, also after an exception."""
    masters = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, master in masters:
            if arithmetic == torch.bfloat16 and master.dtype == torch.float32:
                parameter.data = master.to(arithmetic)
                parameter.grad_dtype = master.dtype
            else:
                parameter.data = round_bf16(master)
        yield
    finally:
        for parameter, master in masters:
            parameter.data = master
