"""The embedded engine's own copy of a version: checked before it samples, and what sampled goes on where it is not right."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from services.inference import weights
from services.inference.engine import Engine
from services.inference.published import bits_of
from services.inference.weights import LiveWeights
from shared.model import Transformer
from shared.weights import WeightsDamaged, checksum
from tests.unit.inference.test_engine_equals_model import build


def model(seed: int) -> Transformer:
    """What a published version makes: bf16's values."""
    made = build(seed=seed)
    for parameter in made.parameters():
        parameter.copy_(parameter.bfloat16().float())
    return made


@pytest.fixture
def live() -> Iterator[LiveWeights]:
    first = model(0)
    engine = Engine(first, 0, rows=2, positions=32, prefill_tokens=16, queue_limit=4)
    engine.start()
    yield LiveWeights(engine, bits_of(first))
    engine.stop()


def test_a_bit_that_flips_in_the_engines_own_copy_keeps_the_version_from_sampling(live, monkeypatch):
    before, new, copy = checksum(live.bits), bits_of(model(1)), weights.write_bits

    def damaged(target: Transformer, bits: weights.Bits) -> None:
        copy(target, bits)
        target.norm.weight.view(torch.int32)[0] ^= 1 << 16  # the lowest bit of a published bf16

    monkeypatch.setattr(weights, "write_bits", damaged)
    with pytest.raises(WeightsDamaged, match="serial 7: the engine's copy hashes to"):
        asyncio.run(live.load(7, new, checksum(new)))
    assert asyncio.run(live.checksum()) == (0, before)
    assert checksum(live.bits) == before
    monkeypatch.undo()
    asyncio.run(live.load(7, new, checksum(new)))
    assert asyncio.run(live.checksum()) == (7, checksum(new))
