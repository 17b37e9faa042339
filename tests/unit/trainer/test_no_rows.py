"""A rank without tokens still computes: others may send its experts theirs, and reductions want a gradient of everything."""

from __future__ import annotations

import pytest
from synthetic import SHAPE

from services.trainer import loss
from services.trainer.layout import attend_shared, lay_out
from services.trainer.replay import build
from shared.model import ModelConfig, Transformer
from shared.model.fp8 import published_in_fp8

LATENT = ModelConfig.from_dict(
    {
        "model_type": "deepseek_v3",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 64,
    }
)


@pytest.mark.parametrize("shape", [SHAPE, LATENT], ids=["qwen3_moe", "deepseek_v3"])
def test_a_batch_of_no_rows_gives_every_parameter_of_the_trunk_a_gradient_of_zero(shape: ModelConfig) -> None:
    model = Transformer(shape)
    batch = lay_out([])
    assert batch.mtp is None
    assert build(batch.units, shape.num_moe_layers, shape.num_experts_per_tok, 0.0) is None
    with published_in_fp8(model):
        out = model(batch.tokens_N, batch.positions_N, attend_shared(batch.blocks))
        logprobs, _ = loss.token_logprobs(
            out.hidden_ND[batch.predict_S], model.head(), batch.target_S, batch.temperature_S
        )
        value = loss.policy_loss(
            logprobs, batch.sampled_logprobs_S, None, batch.advantage_S, clip=2.0, kl=0.0, norm=10.0
        )
        value.backward()
    assert float(value.detach()) == 0.0
    for name, p in model.named_parameters():
        if not name.startswith("mtp_layers."):
            assert p.grad is not None, name
            assert not p.grad.any(), name
