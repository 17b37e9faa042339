"""Random models and batches for benchmarks.gpu_step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from services.trainer.packing import TrainSequence
from shared.model import ModelConfig, Transformer

_COMMON = {
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 8192,
    "initializer_range": 0.02, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True,
}  # fmt: skip
DENSE = _COMMON | {  # the shape of Llama 3.2 1B
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
QWEN = _COMMON | {  # the shape of Qwen3 1.7B
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
NARROW = QWEN | {
    "vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
MIXTURE = NARROW | {
    "model_type": "qwen3_moe", "num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512,
    "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
TINY = MIXTURE | {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
ATTEMPTS = 4  # of a group


def model(shape: dict[str, object], device: str) -> Transformer:
    """Return a random policy, the same at every call, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(ModelConfig.from_dict(dict(shape)))


def routed(rng: np.random.Generator, rows: int, shape: ModelConfig) -> np.ndarray:
    """Distinct experts per row and layer, evenly drawn: what an engine would have recorded."""
    assert shape.moe is not None
    scores = rng.random((rows, shape.num_moe_layers, shape.moe.num_experts))
    return scores.argsort(-1)[..., : shape.num_experts_per_tok].astype(np.uint8)


def rollouts(
    shape: ModelConfig,
    groups: int,
    length: int,
    routing: Callable[[np.random.Generator, int, ModelConfig], np.ndarray] | None,
) -> list[TrainSequence]:
    """Return groups of attempts that share a prompt: prompts and completions of up to `length` tokens each."""
    rng = np.random.default_rng(1)
    found = []
    for group in range(groups):
        P = int(rng.integers(length // 2, length))
        prompt = rng.integers(0, shape.vocab_size, P)
        of_prompt = routing(rng, P, shape) if routing else None
        for _ in range(ATTEMPTS):
            C = int(rng.integers(length // 4, length))
            sampled = np.concatenate((np.zeros(P, bool), rng.random(C) < 0.8))
            sampled[P] = True
            rows = None
            if routing and of_prompt is not None:
                rows = np.concatenate((of_prompt, routing(rng, C - 1, shape)))
            found.append(
                TrainSequence(
                    group=group,
                    tokens_T=np.concatenate((prompt, rng.integers(0, shape.vocab_size, C))),
                    sampled_T=sampled,
                    logprobs_T=np.full(P + C, -np.log(shape.vocab_size), np.float32),
                    versions_T=np.zeros(P + C, np.int32),
                    advantages_T=np.full(P + C, rng.normal(), np.float32),
                    temperature=1.0,
                    experts_TLK=rows,
                )
            )
    return found
