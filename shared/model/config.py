"""The shape of a model, read from a Hugging Face `config.json`.

Field names are Hugging Face's, so that a reader of one knows the other. What this implementation would silently get
wrong (biases, sliding windows, other activations, ways to stretch positions) is refused by name when the file is read. A
field that is absent means what it means to transformers, and is asked for where that would hardly be what was meant.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.model.fields import Fields, UnknownModel

__all__ = ["ARCHITECTURES", "Mla", "ModelConfig", "Moe", "Rope", "UnknownModel", "yarn_mscale"]

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `factor` > 1 selects YaRN with the fields after it. `attention_factor`: what cos and sin
    are multiplied by, None where it follows from `factor` and the mscale pair. `truncate`: the ends of YaRN's ramp are whole
    dimensions."""

    theta: float
    factor: float = 1.0
    original_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
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
        except OSError as error:
            raise UnknownModel(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
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
        """What q·k is multiplied by; with YaRN and mscale_all_dim DeepSeek sharpens it, Qwen does not."""
        scale = self.head_dim**-0.5
        if self.mla and self.rope.factor > 1 and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# Fields with which a model computes otherwise than here, and the values with which it does not; absent is one.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "is_causal": (True, None),
    "partial_rotary_factor": (1, None),
    "original_max_position_embeddings": (None,),  # belongs into rope_parameters
}
_ONLY_DEEPSEEK: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
}
_MANY = 4096  # layers or experts: each is built, so that a number of nonsense would keep the reader busy without end


def _parse(raw: Any) -> ModelConfig:
    if not isinstance(raw, dict):
        raise UnknownModel(f"config.json: found {type(raw).__name__}; allowed: a JSON object")
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UnknownModel(f"config.json: model_type {kind!r:.80}; allowed: {', '.join(ARCHITECTURES)}")
    fields = Fields(raw, f" (model_type {kind})")
    for name, allowed in (_ONLY | (_ONLY_DEEPSEEK if kind == "deepseek_v3" else {})).items():
        if raw.get(name) not in allowed:
            raise UnknownModel(f"config.json: {name} is {raw[name]!r:.80}; supported: {allowed[0]!r}")
    if any(layer != "full_attention" for layer in fields.items("layer_types", str)):
        raise UnknownModel(f"config.json: layer_types is {raw['layer_types']!r:.80}; supported: 'full_attention' alone")

    layers = fields.whole("num_hidden_layers", most=_MANY)
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    mla = _mla(fields) if kind == "deepseek_v3" else None
    moe: Moe | None = None
    moe_layers: tuple[int, ...] = ()
    if kind != "qwen3":
        moe, moe_layers = _deepseek_moe(fields, layers) if mla else _qwen_moe(fields, layers)
        _check_moe(moe, next(name for name in ("n_routed_experts", "num_experts", "num_local_experts") if name in raw))
    if mla:
        head_dim, groups = mla.qk_nope_head_dim + mla.qk_rope_head_dim, heads
    else:  # the default is transformers' for Qwen3; its Qwen3-MoE divides
        head_dim = fields.whole("head_dim", 128 if kind == "qwen3" else max(1, hidden // heads))
        groups = (
            heads if kind == "qwen3" and fields.null("num_key_value_heads") else fields.whole("num_key_value_heads")
        )
        if heads % groups:
            raise UnknownModel(
                f"config.json: num_key_value_heads is {groups}; expected to divide num_attention_heads, {heads}"
            )
    rotated, name = (mla.qk_rope_head_dim, "qk_rope_head_dim") if mla else (head_dim, "head_dim")
    if rotated % 2:
        from_size = "" if mla or "head_dim" in raw else " (hidden_size // num_attention_heads)"
        raise UnknownModel(f"config.json: {name} is {rotated}{from_size}; allowed: an even number")
    dense = len(moe_layers) < layers
    positions = fields.whole("max_position_embeddings", None if mla else 32768)
    return ModelConfig(
        model_type=kind,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size", None if dense else 0, least=1 if dense else 0),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        v_head_dim=mla.v_head_dim if mla else head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=positions,
        initializer_range=fields.number("initializer_range", 0.02),
        rope=_rope(fields, positions, interleaved=bool(mla) and fields.flag("rope_interleave", True)),
        mla=mla,
        moe=moe,
        moe_layers=moe_layers,
        num_mtp_layers=fields.whole("num_nextn_predict_layers", 0, "num_mtp_layers", least=0, most=_MANY),
        raw=dict(raw),
    )


def _mla(fields: Fields) -> Mla:
    return Mla(
        q_lora_rank=None if fields.null("q_lora_rank") else fields.whole("q_lora_rank"),
        kv_lora_rank=fields.whole("kv_lora_rank"),
        qk_nope_head_dim=fields.whole("qk_nope_head_dim"),
        qk_rope_head_dim=fields.whole("qk_rope_head_dim"),
        v_head_dim=fields.whole("v_head_dim"),
    )


def _deepseek_moe(fields: Fields, layers: int) -> tuple[Moe, tuple[int, ...]]:
    """What DeepSeek-V3 itself has (8 groups, 3 dense layers) is no default here: to leave it out of a smaller model changes
    its routing, and no tensor shows that."""
    moe = Moe(
        num_experts=fields.whole("n_routed_experts", None, "num_local_experts", most=_MANY),
        num_experts_per_tok=fields.whole("num_experts_per_tok"),
        intermediate_size=fields.whole("moe_intermediate_size"),
        scoring="sigmoid",
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5, above=0.0),
        n_group=fields.whole("n_group"),
        topk_group=fields.whole("topk_group"),
        n_shared_experts=fields.whole("n_shared_experts", least=0, most=_MANY),
    )
    first = fields.whole("first_k_dense_replace", least=0)
    return moe, tuple(range(first, layers))


def _qwen_moe(fields: Fields, layers: int) -> tuple[Moe, tuple[int, ...]]:
    moe = Moe(
        num_experts=fields.whole("num_experts", None, "num_local_experts", most=_MANY),
        num_experts_per_tok=fields.whole("num_experts_per_tok"),
        intermediate_size=fields.whole("moe_intermediate_size"),
        scoring="softmax",
        norm_topk_prob=fields.flag("norm_topk_prob", False),
    )
    step, dense = fields.whole("decoder_sparse_step", 1), fields.items("mlp_only_layers", int)
    return moe, tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _check_moe(moe: Moe, experts: str) -> None:
    """`experts`: the field that counts them."""
    grouped = f"config.json: n_group {moe.n_group}, topk_group {moe.topk_group}, {experts} {moe.num_experts}"
    if moe.num_experts % moe.n_group or moe.topk_group > moe.n_group:
        raise UnknownModel(f"{grouped}: expected n_group to divide {experts} and 1 <= topk_group <= n_group")
    if 1 < moe.n_group == moe.num_experts:
        raise UnknownModel(f"{grouped}: expected two experts in a group at least, by whose scores it is chosen")
    if moe.num_experts_per_tok > (most := moe.num_experts // moe.n_group * moe.topk_group):
        limits = f"{experts} {moe.num_experts}, n_group {moe.n_group}, topk_group {moe.topk_group}"
        raise UnknownModel(
            f"config.json: num_experts_per_tok is {moe.num_experts_per_tok}; allowed: 1..{most} ({limits})"
        )
    if moe.intermediate_size % 8:
        raise UnknownModel(f"config.json: moe_intermediate_size is {moe.intermediate_size}; expected a multiple of 8")


_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_YARN = {
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "truncate"),
}


def _rope(fields: Fields, positions: int, *, interleaved: bool) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
    new, old = fields.inner("rope_parameters"), fields.inner("rope_scaling")
    if new.raw and old.raw and new.raw != old.raw:
        raise UnknownModel("config.json: rope_parameters and rope_scaling are two things; allowed: one of them")
    rope = old if old.raw else new
    theta = (rope if "rope_theta" in rope.raw else fields).number("rope_theta", 10000.0, above=1.0)
    kind = rope.raw.get("rope_type", rope.raw.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise UnknownModel(f"config.json: {rope.where}rope_type is {kind!r:.80}; allowed: default, yarn")
    known = _ROPE | _YARN if kind == "yarn" else _ROPE
    if strange := sorted(name for name in rope.raw.keys() - known if rope.raw[name] is not None):
        raise UnknownModel(
            f"config.json: {rope.where}{strange[0]} is {rope.raw[strange[0]]!r:.80}; rope type {kind} has no such field, "
            f"allowed: {', '.join(sorted(known))}"
        )
    if rope.raw.get("partial_rotary_factor") not in (1, None):
        found = rope.raw["partial_rotary_factor"]
        raise UnknownModel(f"config.json: {rope.where}partial_rotary_factor is {found!r:.80}; supported: 1")
    if kind == "default":
        return Rope(theta=theta, interleaved=interleaved)
    given = Fields({name: value for name, value in rope.raw.items() if value is not None}, rope.what, rope.where)
    return Rope(
        theta=theta,
        factor=given.number("factor", least=1.0),
        original_positions=given.whole("original_max_position_embeddings", positions),
        beta_fast=given.number("beta_fast", 32.0, least=0.0) or 32.0,  # 0 is none to transformers, too
        beta_slow=given.number("beta_slow", 1.0, least=0.0) or 1.0,
        mscale=given.number("mscale", 0.0, least=0.0),
        mscale_all_dim=given.number("mscale_all_dim", 0.0, least=0.0),
        attention_factor=given.number("attention_factor", above=0.0) if "attention_factor" in given.raw else None,
        truncate=rope.flag("truncate", True),
        interleaved=interleaved,
    )
