"""Every dense family trains: gradients, a step, and the version that comes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from synthetic import V, sequences

from services.inference.weights import write_bits
from services.trainer import loss, packing
from services.trainer.engine import Engine
from services.trainer.layout import attend_shared, lay_out
from services.trainer.masters import published_bits
from services.trainer.step import Trainer
from shared import weights
from shared.contracts.run import TrainConfig
from shared.model import ModelConfig, Transformer, published_tensors
from shared.objects import Objects

CONFIG = TrainConfig(learning_rate=1e-2, warmup_steps=0, norm_tokens=8.0, micro_batch_tokens=60)
COMMON = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
SHAPES = {
    "llama": {**COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {**COMMON, "model_type": "qwen2"},
    "qwen3": {**COMMON, "model_type": "qwen3"},
}


def policy(family: str) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig.from_dict(SHAPES[family]))


def gradients(model: Transformer, *, share: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    found = sequences(np.random.default_rng(1), groups=3, attempts=6, routed=False)
    batch = lay_out(packing.form_units(found, replay=True, share=share))
    out = model(batch.tokens_N, batch.positions_N, attend_shared(batch.blocks))
    logprobs, _ = loss.token_logprobs(out.hidden_ND[batch.predict_S], model.head(), batch.target_S, batch.temperature_S)
    loss.policy_loss(
        logprobs, batch.sampled_logprobs_S, None, batch.advantage_S, clip=2.0, kl=0.0, norm=10.0
    ).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", SHAPES)
def test_every_parameter_has_a_gradient_and_prefix_sharing_does_not_change_it(family: str) -> None:
    model = policy(family)
    alone, shared = gradients(model, share=False), gradients(model, share=True)
    assert shared.keys() == alone.keys() == dict(model.named_parameters()).keys()
    for name, expected in alone.items():
        scale = float(expected.abs().max())
        assert scale > 0
        assert float((shared[name] - expected).abs().max()) <= 1e-5 * scale, name


@pytest.mark.parametrize("family", SHAPES)
def test_a_step_moves_the_policy_and_engines_rebuild_the_version_bit_for_bit(family: str, objects: Objects) -> None:
    model = policy(family)
    before = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
    first = published_bits(model)
    base = weights.publish(objects, "r-test", 0, 0, 0, None, first)
    Trainer(Engine(model, CONFIG), CONFIG).train(
        sequences(np.random.default_rng(0), groups=3, routed=False), attempts=12, step=1
    )
    still = [name for name, tensor in published_tensors(model).items() if torch.equal(tensor, before[name])]
    assert not still
    bits = published_bits(model)
    ref = weights.publish(objects, "r-test", 1, 0, 1, weights.Version(0, base, first), bits)
    rebuilt, engine = weights.rebuild(objects, ref), policy(family).requires_grad_(False)
    write_bits(engine, rebuilt)
    for name, tensor in published_tensors(engine).items():
        assert torch.equal(tensor, published_tensors(model)[name].to(torch.bfloat16).float()), name
