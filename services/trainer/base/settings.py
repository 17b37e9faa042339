"""What the recipe is made with (docs/base.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.trainer.base.tokenizer import VOCABULARY

CONTEXT = 512

# Qwen3-MoE: 2.7M parameters with the MTP layer, 1.4M of the trunk active per token. Four experts: for the few tokens of an
# engine step, eight of them cost a fifth more (more and smaller products).
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.02,
    "hidden_act": "silu",
    "attention_bias": False,
}


@dataclass(frozen=True, slots=True)
class Phase:
    """`share` of the minutes. The learning rate is `start` -> `end` times its full value, linearly, after a warm-up.
    `context_weight`: of code and tests in the loss, where an action counts 1."""

    name: str
    share: float
    start: float
    end: float
    context_weight: float
    warmup_steps: int = 50


PRETRAIN = Phase("pretrain", share=0.5, start=1.0, end=0.35, context_weight=0.25)
SFT = Phase("sft", share=0.43, start=0.4, end=0.0, context_weight=0.1)
MTP = Phase("mtp", share=0.07, start=1.0, end=0.05, context_weight=0.0)

MUON_LR = 0.02
ADAM_LR = 1e-2
CLIP = 4.0
TOKENS_PER_RANK = 2560  # of a batch, padding included
