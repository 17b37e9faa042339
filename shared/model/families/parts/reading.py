"""What the families share when they read a config.json. Each function raises UnknownModel with the name of a field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.model.config import Mla, ModelConfig, Moe, Rope, Serving
from shared.model.fields import Fields, UnknownModel

MANY = 4096  # layers or experts: each is built, so a nonsensical number would keep the reader busy without end

# Field -> accepted values. An absent field is accepted.
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "is_causal": (True, None),
    "partial_rotary_factor": (1, None),
    "original_max_position_embeddings": (None,),  # its place is rope_parameters
}
_WAYS_OUT = {
    "quantization_config": "undo the quantisation first (DeepSeek publishes fp8_cast_bf16.py for its FP8), then remove the field",
    "attention_bias": "no family here has a bias on the attention's output",
}


def refuse(fields: Fields, more: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    """Refuse each field of ONLY and `more` that has another value than those listed."""
    for name, allowed in (ONLY | dict(more or {})).items():
        if fields.raw.get(name) not in allowed:
            way_out = f"; {_WAYS_OUT[name]}" if name in _WAYS_OUT else ""
            raise UnknownModel(
                f"config.json: {name} is {fields.raw[name]!r:.80}; supported: {allowed[0]!r}{way_out}{fields.what}"
            )
    if any(layer != "full_attention" for layer in fields.items("layer_types", str)):
        raise UnknownModel(
            f"config.json: layer_types is {fields.raw['layer_types']!r:.80}; supported: 'full_attention' alone"
        )


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, key-value heads, and the sizes of a key and of a value."""

    heads: int
    groups: int
    size: int
    v_size: int
    mla: Mla | None = None


def grouped(fields: Fields, *, size: int | None = None, groups: int | None = None) -> Heads:
    """Read the heads of grouped-query attention. `size`: head_dim if the field is absent; None: hidden_size / heads, for null too.
    `groups`: key-value heads if the field is absent; -1: as many as heads; None: the field is required. A null number of key-value
    heads means as many as heads, as in every family of transformers."""
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    divided = size is None and fields.raw.get("head_dim") is None
    head_dim = max(1, hidden // heads) if divided else fields.whole("head_dim", size)
    _even("head_dim", head_dim, " (hidden_size // num_attention_heads)" if divided else "")
    there = heads if fields.null("num_key_value_heads") else None
    found = there or fields.whole("num_key_value_heads", heads if groups == -1 else groups)
    if heads % found:
        raise UnknownModel(
            f"config.json: num_key_value_heads is {found}; expected to divide num_attention_heads, {heads}"
        )
    return Heads(heads, found, head_dim, head_dim)


def latent(fields: Fields) -> Heads:
    """Multi-head latent attention."""
    mla = Mla(
        q_lora_rank=None if fields.null("q_lora_rank") else fields.whole("q_lora_rank"),
        kv_lora_rank=fields.whole("kv_lora_rank"),
        qk_nope_head_dim=fields.whole("qk_nope_head_dim"),
        qk_rope_head_dim=fields.whole("qk_rope_head_dim"),
        v_head_dim=fields.whole("v_head_dim"),
    )
    _even("qk_rope_head_dim", mla.qk_rope_head_dim, "")
    heads = fields.whole("num_attention_heads")
    return Heads(heads, heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim, mla)


def _even(name: str, size: int, why: str) -> None:
    if size % 2:
        raise UnknownModel(f"config.json: {name} is {size}{why}; allowed: an even number")


def layers(fields: Fields) -> int:
    return fields.whole("num_hidden_layers", most=MANY)


def model(
    fields: Fields,
    *,
    name: str,
    architecture: str,
    heads: Heads,
    rope: Rope,
    positions: int,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    moe: Moe | None = None,
    moe_layers: tuple[int, ...] = (),
    serving: Serving | None = None,
) -> ModelConfig:
    """The configuration; reads the fields that all families have alike."""
    dense = len(moe_layers) < layers(fields)
    return ModelConfig(
        model_type=name,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=fields.whole("hidden_size"),
        intermediate_size=fields.whole("intermediate_size", None if dense else 0, least=1 if dense else 0),
        num_hidden_layers=layers(fields),
        num_attention_heads=heads.heads,
        num_key_value_heads=heads.groups,
        head_dim=heads.size,
        v_head_dim=heads.v_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=positions,
        initializer_range=fields.number("initializer_range", 0.02),
        rope=rope,
        architecture=architecture,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        mla=heads.mla,
        moe=moe,
        moe_layers=moe_layers,
        num_mtp_layers=fields.whole("num_nextn_predict_layers", 0, "num_mtp_layers", least=0, most=MANY),
        serving=serving or Serving(),
        raw=dict(fields.raw),
    )


# Experts


def experts_field(fields: Fields, *names: str) -> str:
    """Which of these names the file counts its experts under; the first where it has none."""
    return next((name for name in names if name in fields.raw), names[0])


def check_moe(moe: Moe, experts: str) -> None:
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


# Rotary embedding

_ALWAYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
_FIELDS = {
    "default": _ALWAYS,
    "linear": _ALWAYS | {"factor"},
    "llama3": _ALWAYS | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _ALWAYS
    | {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
    | {"mscale", "mscale_all_dim", "truncate"},
}


def rope(fields: Fields, positions: int, kinds: tuple[str, ...], *, interleaved: bool = False) -> Rope:
    """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before). `kinds`: those that the family
    may have."""
    new, old = fields.inner("rope_parameters"), fields.inner("rope_scaling")
    if new.raw and old.raw and new.raw != old.raw:
        raise UnknownModel("config.json: rope_parameters and rope_scaling are two things; allowed: one of them")
    found = old if old.raw else new
    theta = (found if "rope_theta" in found.raw else fields).number("rope_theta", 10000.0, above=1.0)
    kind = found.raw.get("rope_type", found.raw.get("type", "default"))
    if kind not in kinds:
        raise UnknownModel(f"config.json: {found.where}rope_type is {kind!r:.80}; allowed: {', '.join(kinds)}")
    _refuse_strange(found, kind)
    if kind == "default":
        return Rope(theta=theta, interleaved=interleaved)
    given = Fields({name: value for name, value in found.raw.items() if value is not None}, found.what, found.where)
    factor = given.number("factor", least=1.0)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor, interleaved=interleaved)
    if kind == "llama3":
        low = given.number("low_freq_factor", above=0.0)
        return Rope(
            theta=theta,
            kind=kind,
            factor=factor,
            original_positions=given.whole("original_max_position_embeddings"),
            low_freq_factor=low,
            high_freq_factor=given.number("high_freq_factor", above=low),
            interleaved=interleaved,
        )
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_positions=given.whole("original_max_position_embeddings", positions),
        beta_fast=given.number("beta_fast", 32.0, least=0.0) or 32.0,  # transformers, too, takes 0 for absent
        beta_slow=given.number("beta_slow", 1.0, least=0.0) or 1.0,
        mscale=given.number("mscale", 0.0, least=0.0),
        mscale_all_dim=given.number("mscale_all_dim", 0.0, least=0.0),
        attention_factor=given.number("attention_factor", above=0.0) if "attention_factor" in given.raw else None,
        truncate=found.flag("truncate", True),
        interleaved=interleaved,
    )


def _refuse_strange(found: Fields, kind: str) -> None:
    known = _FIELDS[kind]
    if strange := sorted(name for name in found.raw.keys() - known if found.raw[name] is not None):
        raise UnknownModel(
            f"config.json: {found.where}{strange[0]} is {found.raw[strange[0]]!r:.80}; rope type {kind} has no such field, "
            f"allowed: {', '.join(sorted(known))}"
        )
    partial = found.raw.get("partial_rotary_factor")
    if partial not in (1, None):
        raise UnknownModel(f"config.json: {found.where}partial_rotary_factor is {partial!r:.80}; supported: 1")
