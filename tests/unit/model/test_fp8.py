"""FP8 as engines compute it, emulated: what is rounded, and that nothing else is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model import ModelConfig, Transformer, causal_rows, published_tensors
from shared.model.fp8 import GROUP, per_tensor, per_token, published_in_fp8, round_inputs, round_weights
from shared.weights.blocks import LARGEST, in_fp8, is_fp8
from shared.weights.torch_tensors import from_bits, to_bits

CONFIG = ModelConfig.from_dict(
    {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 1,
        "initializer_range": 0.1,
    }
)


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


def logits(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model.logits(model(tokens, torch.arange(len(tokens)), causal_rows(1, len(tokens))).hidden_ND)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 1 << 30), st.integers(-20, 20))
def test_an_input_is_rounded_to_nearest_with_a_scale_per_token_and_group(rows, width, seed, power):
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    found = per_token(x)
    for start in range(0, width, GROUP):
        group, rounded = x[:, start : start + GROUP], found[:, start : start + GROUP]
        scale = group.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
        exponent = torch.frexp(group / scale).exponent - 1  # E4M3: three bits after the first, down to 2^-6
        step = scale * torch.exp2(exponent.clamp(min=-6) - 3.0)
        assert ((rounded - group).abs() <= 0.5001 * step).all()
        assert torch.equal(rounded[group == 0], group[group == 0])


def test_with_a_scale_per_token_a_row_is_rounded_alike_in_every_batch_and_with_one_per_tensor_it_is_not():
    x = torch.randn(1, 300)
    beside = torch.cat([x, 100 * torch.randn(3, 300)])
    assert torch.equal(per_token(x)[0], per_token(beside)[0])
    assert not torch.equal(per_tensor(x)[0], per_tensor(beside)[0])


def test_gradients_pass_the_rounding_unchanged():
    x = torch.randn(3, 200, requires_grad=True)
    weight = torch.randn(3, 200)
    (per_token(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_inside_every_matrix_that_engines_hold_in_fp8_has_the_value_of_its_blocks_and_the_masters_come_back(model):
    before = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
    expected = from_bits(in_fp8(to_bits(before)))
    plain = logits(model, torch.arange(9))
    with published_in_fp8(model):
        inside = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
        rounded = logits(model, torch.arange(9))
    assert all(torch.equal(inside[name], expected[name].float()) for name in before)
    assert {name for name in before if is_fp8(name, before[name].ndim)} >= {
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.experts.3.down_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    }
    assert not any(is_fp8(name, 2) for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_tensors(model).items())
    assert torch.equal(plain, logits(model, torch.arange(9)))
    assert 1e-3 < float((plain - rounded).detach().abs().max()) < 1.0


def test_weights_are_rounded_once_however_often_that_is_asked(model):
    round_weights(model)
    once = {name: tensor.clone() for name, tensor in published_tensors(model).items()}
    round_weights(model)
    assert all(torch.equal(tensor, once[name]) for name, tensor in published_tensors(model).items())


def test_inputs_are_rounded_until_that_is_ended(model):
    seen: list[torch.Size] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape)
        return x

    end = round_inputs(model, rounding=watched)
    logits(model, torch.arange(5))
    # Attention's two products in each layer; the experts' two; the dense feed-forward's two. Neither router nor head.
    assert seen == [(5, 256), (5, 256), (5, 256), (10, 128), (5, 256), (5, 256), (5, 256), (5, 256)]
    end()
    logits(model, torch.arange(5))
    assert len(seen) == 8


def test_masters_in_another_type_are_refused(model):
    with pytest.raises(ValueError, match=r"allowed: torch\.float32"), published_in_fp8(model.bfloat16()):
        pass
