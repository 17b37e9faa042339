"""The shape of a model, read from a Hugging Face `config.json`.

Field names are Hugging Face's, so that a reader of one knows the other. What this implementation would silently get
wrong (biases, sliding windows, other activations) is refused when the file is read.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


class UnknownModel(ValueError):
    """The checkpoint is of a kind or shape that this implementation does not know; the text names the field."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `factor` > 1 selects YaRN with the fields after it."""

    theta: float
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False  # pairs are (2i, 2i+1) instead of (i, i + D/2): DeepSeek


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention: keys and values come from one small latent per token."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class Moe:
    """Routed experts. `scoring` softmax (Qwen) or sigmoid with a correction bias and group limit (DeepSeek)."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    scoring: str  # softmax | sigmoid
    norm_topk_prob: bool
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    n_shared_experts: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`head_dim` is the size of a query/key head, `v_head_dim` of a value head; they differ only under MLA."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    initializer_range: float
    rope: Rope
    mla: Mla | None = None
    moe: Moe | None = None
    moe_layers: tuple[int, ...] = ()  # which of the num_hidden_layers are MoE; MTP layers are like the last one
    num_mtp_layers: int = 0
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)  # config.json as it was read

    @staticmethod
    def load(directory: Path | str) -> ModelConfig:
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise UnknownModel(f"{directory}: no config.json; expected a Hugging Face checkpoint directory") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise UnknownModel(f"{path}: not JSON ({error})") from None
        return ModelConfig.from_dict(raw)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> ModelConfig:
        """Raises UnknownModel for what cannot be represented, naming the field."""
        return _parse(raw)

    def to_dict(self) -> dict[str, Any]:
        """What goes into config.json: what was read, plus what loaders look for."""
        return {**self.raw, "model_type": self.model_type, "architectures": [ARCHITECTURES[self.model_type]]}

    @property
    def num_moe_layers(self) -> int:
        """L of `experts_NLK`: the MoE layers of the trunk."""
        return len(self.moe_layers)

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.num_experts_per_tok if self.moe else 0

    @property
    def attention_scale(self) -> float:
        """What q·k is multiplied by; with YaRN and mscale_all_dim DeepSeek sharpens it."""
        scale = self.head_dim**-0.5
        if self.rope.factor > 1 and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_REFUSED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}


def _parse(raw: Any) -> ModelConfig:
    if not isinstance(raw, dict):
        raise UnknownModel(f"config.json: found {type(raw).__name__}; allowed: a JSON object")
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise UnknownModel(f"config.json: model_type {kind!r}; allowed: {', '.join(ARCHITECTURES)}")
    for name, allowed in _REFUSED.items():
        if raw.get(name, allowed[0]) not in allowed:
            raise UnknownModel(f"config.json: {name} is {raw[name]!r}; supported: {allowed[0]!r}")

    def need(name: str, *others: str) -> Any:
        for key in (name, *others):
            if raw.get(key) is not None:
                return raw[key]
        raise UnknownModel(f"config.json: field {name!r} is missing (model_type {kind})")

    heads, hidden, layers = need("num_attention_heads"), need("hidden_size"), need("num_hidden_layers")
    mla = moe = None
    moe_layers: tuple[int, ...] = ()
    if kind == "deepseek_v3":
        mla = Mla(
            q_lora_rank=raw.get("q_lora_rank"),
            kv_lora_rank=need("kv_lora_rank"),
            qk_nope_head_dim=need("qk_nope_head_dim"),
            qk_rope_head_dim=need("qk_rope_head_dim"),
            v_head_dim=need("v_head_dim"),
        )
        moe = Moe(
            num_experts=need("n_routed_experts", "num_local_experts"),
            num_experts_per_tok=need("num_experts_per_tok"),
            intermediate_size=need("moe_intermediate_size"),
            scoring="sigmoid",
            norm_topk_prob=raw.get("norm_topk_prob", True),
            routed_scaling_factor=raw.get("routed_scaling_factor", 2.5),
            n_group=raw.get("n_group") or 1,
            topk_group=raw.get("topk_group") or 1,
            n_shared_experts=raw.get("n_shared_experts") or 0,
        )
        if raw.get("moe_layer_freq", 1) != 1:
            raise UnknownModel(f"config.json: moe_layer_freq is {raw['moe_layer_freq']!r}; supported: 1")
        moe_layers = tuple(range(raw.get("first_k_dense_replace") or 0, layers))
    elif kind == "qwen3_moe":
        moe = Moe(
            num_experts=need("num_experts", "num_local_experts"),
            num_experts_per_tok=need("num_experts_per_tok"),
            intermediate_size=need("moe_intermediate_size"),
            scoring="softmax",
            norm_topk_prob=raw.get("norm_topk_prob", False),
        )
        step, dense = raw.get("decoder_sparse_step") or 1, raw.get("mlp_only_layers") or []
        moe_layers = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if moe:
        _check_moe(moe)
    mtp = raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else raw.get("head_dim") or hidden // heads
    return ModelConfig(
        model_type=kind,
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=raw.get("intermediate_size") or 0,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if mla else raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        v_head_dim=mla.v_head_dim if mla else head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_position_embeddings=raw.get("max_position_embeddings", 32768),
        initializer_range=raw.get("initializer_range", 0.02),
        rope=_rope(raw, interleaved=bool(mla) and raw.get("rope_interleave", True)),
        mla=mla,
        moe=moe,
        moe_layers=moe_layers,
        num_mtp_layers=mtp,
        raw=dict(raw),
    )


def _check_moe(moe: Moe) -> None:
    if not 0 < moe.num_experts_per_tok <= moe.num_experts:
        raise UnknownModel(
            f"config.json: num_experts_per_tok is {moe.num_experts_per_tok}; allowed: 1..{moe.num_experts}"
        )
    if moe.num_experts % moe.n_group or not 0 < moe.topk_group <= moe.n_group:
        raise UnknownModel(
            f"config.json: n_group {moe.n_group}, topk_group {moe.topk_group}: expected n_group to divide "
            f"{moe.num_experts} experts and 1 <= topk_group <= n_group"
        )
    if moe.intermediate_size % 8:
        raise UnknownModel(f"config.json: moe_intermediate_size is {moe.intermediate_size}; expected a multiple of 8")


def _rope(raw: dict[str, Any], *, interleaved: bool) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta, interleaved=interleaved)
    if kind != "yarn":
        raise UnknownModel(f"config.json: rope type {kind!r}; allowed: default, yarn")
    return Rope(
        theta=theta,
        factor=parameters["factor"],
        original_positions=parameters.get("original_max_position_embeddings") or raw["max_position_embeddings"],
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        mscale=parameters.get("mscale") or 0.0,
        mscale_all_dim=parameters.get("mscale_all_dim") or 0.0,
        interleaved=interleaved,
    )
