"""Between float32 masters and what is published: bf16 bits under the published names. Needs torch, not DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from shared.model import ModelConfig, Transformer, published_tensors
from shared.model.checkpoint import KEPT_IN_FLOAT32
from shared.weights import Tensors
from shared.weights.torch_tensors import from_bits


def published_bits(model: Transformer) -> dict[str, np.ndarray]:
    """Return what the engines serve: bf16 bits of the masters under their published names. A copy."""
    return PublishedBits().copy(published_tensors(model))


class PublishedBits:
    """Host memory for one version's bits, made by the first `copy` and used again by every later one: a fresh allocation of a
    gigabyte costs more than to fill it. Page-locked where the model lies on a CUDA device, so that the copy is one transfer."""

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}

    def copy(self, masters: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return the bits that the masters, by published name, round to (nearest, ties to even). The next `copy` overwrites
        them."""
        if not self._host:
            self._host = {name: _room(name, tensor) for name, tensor in masters.items()}
        for name, tensor in masters.items():
            self._host[name].copy_(tensor)
        return {name: _bits(tensor) for name, tensor in self._host.items()}


def _room(name: str, tensor: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith(KEPT_IN_FLOAT32) else torch.bfloat16
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)


def _bits(host: Tensor) -> np.ndarray:
    return host.numpy() if host.dtype == torch.float32 else host.view(torch.int16).numpy().view(np.uint16)


def load_published(model: Transformer, tensors: Tensors) -> None:
    """The masters become a published version's values. Raises ValueError where a tensor is missing or of another shape."""
    views = published_tensors(model)
    for name, value in from_bits(tensors).items():
        if name not in views or views[name].shape != value.shape:
            raise ValueError(f"{name!r}: found {tuple(value.shape)}, which is no tensor of this run's model")
        views[name].copy_(value)
    if missing := sorted(views.keys() - tensors.keys()):
        raise ValueError(f"the version has no {missing[0]!r}")


def model_from_state(config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
    """The model of a step checkpoint's masters (`Engine.state`: `<part>/<parameter>`; moments carry a colon)."""
    model = Transformer(config)
    values = {key.split("/", 1)[1]: value for key, value in state.items() if ":" not in key}
    with torch.no_grad():
        for name, target in [*model.named_parameters(), *model.named_buffers()]:
            if name in values:
                target.copy_(values[name])
            elif isinstance(target, torch.nn.Parameter):
                raise ValueError(f"the checkpoint has no master of {name!r}")
    return model
