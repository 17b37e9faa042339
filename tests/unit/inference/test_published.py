"""The checksum of live weights is that of their published form, whatever the model is made of, and follows every change."""

from __future__ import annotations

import pytest
import torch

from services.inference.published import Checksum, bits_of
from shared.model import ModelConfig, Transformer, published_tensors
from shared.model.checkpoint import narrowed
from shared.weights import checksum
from tests.unit.inference.test_sglang_weights import KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_live_weights_hash_to_what_their_published_form_does(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = narrowed(Transformer(ModelConfig.from_dict(KINDS[kind])), dtype).requires_grad_(False)
    hash_of, weights = Checksum(model), published_tensors(model)
    seen = [hash_of(weights)]
    assert seen == [checksum(bits_of(model))]
    for tensor in weights.values():
        tensor += 1  # in place, as a new version is written
        seen.append(hash_of(weights))
        assert seen[-1] == checksum(bits_of(model))
    assert len(set(seen)) == len(seen)
