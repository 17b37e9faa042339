"""config.json from the metadata of a GGUF file, for the families that llama.cpp stores alike.

The metadata are plain values under llama.cpp's names, which begin with the file's architecture. `tied` and `rope_divisors`
are added by the reader (`shared.model.gguf_file`): whether the file has no head of its own, and the divisors of Llama 3's
rotations where the file has them as a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shared.model.fields import UnknownModel

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # 3.1, 3.2, 3.3


def dense(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that all dense models have."""
    heads, hidden = value(meta, "attention.head_count"), value(meta, "embedding_length")
    size = value(meta, "attention.key_length", hidden // heads)
    theta = float(value(meta, "rope.freq_base", 10000.0))
    if (other := value(meta, "attention.value_length", size)) != size:
        raise UnknownModel(f"GGUF: attention.value_length is {other}; allowed: attention.key_length, {size}")
    if (rotated := value(meta, "rope.dimension_count", size)) != size:
        raise UnknownModel(f"GGUF: rope.dimension_count is {rotated}; allowed: the whole head, {size}")
    return {
        "vocab_size": len(meta["tokenizer.ggml.tokens"])
        if "tokenizer.ggml.tokens" in meta
        else value(meta, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": value(meta, "feed_forward_length"),
        "num_hidden_layers": value(meta, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value(meta, "attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": value(meta, "context_length"),
        "rms_norm_eps": _decimal(value(meta, "attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_theta": theta, **_rope(meta, theta, size)},
        "tie_word_embeddings": bool(meta["tied"]),
        "hidden_act": "silu",
    }


def experts(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3-MoE: every layer has experts."""
    return {
        **dense({**meta, f"{meta['general.architecture']}.feed_forward_length": value(meta, "feed_forward_length", 0)}),
        "num_experts": value(meta, "expert_count"),
        "num_experts_per_tok": value(meta, "expert_used_count"),
        "moe_intermediate_size": value(meta, "expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,  # llama.cpp always does for this architecture
    }


def value(meta: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """A value of the file's architecture. Raises UnknownModel where it is missing and has no default, and where it is given
    layer by layer."""
    key = f"{meta['general.architecture']}.{name}"
    found = meta.get(key, default)
    if found is None:
        raise UnknownModel(f"GGUF: metadata {key!r} is missing")
    if isinstance(found, list):
        if len(set(found)) != 1:
            raise UnknownModel(f"GGUF: {key} is {str(found)[:80]}; allowed: one number for all layers")
        return found[0]
    return found


def _decimal(number: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _rope(meta: Mapping[str, Any], theta: float, size: int) -> dict[str, Any]:
    if (divisors := meta.get("rope_divisors")) is not None:
        return _llama3(np.asarray(divisors, np.float64), theta, size)
    kind = value(meta, "rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnknownModel(f"GGUF: rope.scaling.type is {kind!r:.80}; allowed: none, linear, yarn")
    rope = {"rope_type": kind, "factor": float(value(meta, "rope.scaling.factor"))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = value(meta, "rope.scaling.original_context_length")
    return rope


def _llama3(divisors: np.ndarray, theta: float, size: int) -> dict[str, Any]:
    """llama.cpp stores what Llama 3's scaling makes of each rotation, and not its four numbers. All published models differ
    in `factor` alone; other numbers are refused."""
    wave = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    factor, low, high = divisors.max(), _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = ((_LLAMA3["original_max_position_embeddings"] / wave - low) / (high - low)).clip(0, 1)
    if divisors.shape != wave.shape or not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise UnknownModel(
            "GGUF: rope_freqs.weight is not Llama 3's scaling; allowed: low_freq_factor 1, high_freq_factor 4 over 8192 "
            "positions, any factor"
        )
    return {"rope_type": "llama3", "factor": round(float(factor), 4), **_LLAMA3}
