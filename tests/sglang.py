"""The real SGLang that tests run against: infra/sglang_cpu.

ETUDE_TEST_SGLANG says what a test does where `make sglang` has not installed it: `auto` (the default) skips, `require` fails.
`none` skips even where it is installed.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from infra import sglang_cpu
from tests import missing

# Tiny checkpoints of the architectures that SGLang serves for us. Their logits' standard deviation is above 1.
COMMON = {
    "vocab_size": 500,  # no multiple of 64: SGLang pads it
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
EXPERTS = {
    **COMMON,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {**COMMON, "model_type": "qwen3", "tie_word_embeddings": True},
    "llama": {
        **COMMON,
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {**COMMON, "model_type": "qwen2", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "tie_word_embeddings": True},
    "deepseek_v3": {
        **EXPERTS,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.0,
        "rope_parameters": {  # on the CPU SGLang knows DeepSeek's rotary embedding with YaRN alone
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}
POLICIES = ("auto", "require", "none")


def interpreter() -> str:
    """That of SGLang's environment; skips or fails the test where there is none."""
    policy = os.environ.get("ETUDE_TEST_SGLANG", "auto")
    if policy not in POLICIES:
        pytest.fail(f"ETUDE_TEST_SGLANG: found {policy!r}; allowed: {', '.join(POLICIES)}")
    if policy == "none":
        pytest.skip("ETUDE_TEST_SGLANG=none")
    found = sglang_cpu.python()
    if found is None and policy == "require":
        pytest.fail(missing.reason(["SGLang (6 GB)"], "make sglang"))
    if found is None:
        missing.skip(["SGLang (6 GB)"], "make sglang")
    return str(found)
