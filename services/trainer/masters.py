"""Between float32 masters and what is published: bf16 bits under the published names. Needs torch, not DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from shared.model import ModelConfig, Transformer, published_tensors
from shared.model.checkpoint import KEPT_IN_FLOAT32
from shared.weights import Tensors
from shared.weights.torch_tensors import from_bits, to_bits


def published_bits(model: Transformer) -> dict[str, np.ndarray]:
    """What the engines serve: bf16 bits of the masters under their published names. A copy."""
    tensors = published_tensors(model)
    keep = frozenset(name for name in tensors if name.endswith(KEPT_IN_FLOAT32))
    return to_bits(tensors, keep_float32=keep)


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
