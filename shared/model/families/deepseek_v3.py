"""DeepSeek-V3: latent attention, experts behind a sigmoid router with a correction bias, MTP layers."""

from __future__ import annotations

from shared.model.config import Drafting, ModelConfig, Moe, Serving
from shared.model.families import Family
from shared.model.families.parts import reading
from shared.model.fields import Fields

SERVING = Serving(
    drafting=Drafting(
        live=("model.enorm", "model.hnorm", "model.eh_proj", "model.shared_head.norm"), decoder="model.decoder"
    )
)
_ONLY = {"moe_layer_freq": (1, None), "scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}


def read(fields: Fields) -> ModelConfig:
    return read_as("deepseek_v3", SERVING, fields)


def read_as(name: str, serving: Serving, fields: Fields) -> ModelConfig:
    """`name`: the `model_type` that the file says, for families that are DeepSeek-V3 under another name."""
    reading.refuse(fields, _ONLY)
    positions = fields.whole("max_position_embeddings")
    heads = reading.latent(fields)
    moe, moe_layers = _moe(fields)
    interleaved = fields.flag("rope_interleave", True)
    return reading.model(
        fields,
        name=name,
        architecture="DeepseekV3ForCausalLM",
        heads=heads,
        rope=reading.rope(fields, positions, ("default", "yarn"), interleaved=interleaved),
        positions=positions,
        moe=moe,
        moe_layers=moe_layers,
        serving=serving,
    )


def _moe(fields: Fields) -> tuple[Moe, tuple[int, ...]]:
    """DeepSeek-V3's own sizes (8 groups, 3 dense layers) are no defaults here: leaving them out of a smaller model would
    change its routing, and no tensor shows that."""
    moe = Moe(
        num_experts=fields.whole("n_routed_experts", None, "num_local_experts", most=reading.MANY),
        num_experts_per_tok=fields.whole("num_experts_per_tok"),
        intermediate_size=fields.whole("moe_intermediate_size"),
        scoring="sigmoid",
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 2.5, above=0.0),
        n_group=fields.whole("n_group"),
        topk_group=fields.whole("topk_group"),
        n_shared_experts=fields.whole("n_shared_experts", least=0, most=reading.MANY),
    )
    reading.check_moe(moe, reading.experts_field(fields, "n_routed_experts", "num_local_experts"))
    first = fields.whole("first_k_dense_replace", least=0)
    return moe, tuple(range(first, reading.layers(fields)))


FAMILY = Family("deepseek_v3", read)
