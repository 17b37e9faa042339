"""Qwen3-MoE: Qwen3's attention, experts behind a softmax router."""

from __future__ import annotations

from shared.model.config import Drafting, ModelConfig, Moe, Serving
from shared.model.families import Family, Gguf
from shared.model.families.parts import reading
from shared.model.families.parts.llama_cpp import experts
from shared.model.families.qwen3 import ONLY, ROPES
from shared.model.fields import Fields

# No Qwen3-MoE was published with an MTP layer; these are SGLang's own names for one.
SERVING = Serving(
    ties_head=False,
    drafting=Drafting(
        live=("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "model.norm"),
        decoder="model.layers.0",
        files=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"),
    ),
)


def read(fields: Fields) -> ModelConfig:
    reading.refuse(fields, ONLY | {"shared_expert_intermediate_size": (0, None)})
    positions = fields.whole("max_position_embeddings", 32768)
    moe, moe_layers = _moe(fields)
    return reading.model(
        fields,
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        heads=reading.grouped(fields),
        rope=reading.rope(fields, positions, ROPES),
        positions=positions,
        qk_norm=True,
        moe=moe,
        moe_layers=moe_layers,
        serving=SERVING,
    )


def _moe(fields: Fields) -> tuple[Moe, tuple[int, ...]]:
    moe = Moe(
        num_experts=fields.whole("num_experts", None, "num_local_experts", most=reading.MANY),
        num_experts_per_tok=fields.whole("num_experts_per_tok"),
        intermediate_size=fields.whole("moe_intermediate_size"),
        scoring="softmax",
        norm_topk_prob=fields.flag("norm_topk_prob", False),
    )
    reading.check_moe(moe, reading.experts_field(fields, "num_experts", "num_local_experts"))
    step, dense = fields.whole("decoder_sparse_step", 1), fields.items("mlp_only_layers", int)
    return moe, tuple(i for i in range(reading.layers(fields)) if i not in dense and (i + 1) % step == 0)


FAMILY = Family("qwen3_moe", read, Gguf("qwen3moe", experts))
