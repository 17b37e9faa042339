"""Llama 2 and 3, and everything published as one (SmolLM2, …): grouped-query attention without head norms and biases."""

from __future__ import annotations

from shared.model.config import ModelConfig
from shared.model.families import Family, Gguf
from shared.model.families.parts import reading
from shared.model.families.parts.llama_cpp import dense
from shared.model.fields import Fields

ROPES = ("default", "linear", "llama3", "yarn")


def read(fields: Fields) -> ModelConfig:
    reading.refuse(fields, {"mlp_bias": (False, None)})
    positions = fields.whole("max_position_embeddings", 2048)
    return reading.model(
        fields,
        name="llama",
        architecture="LlamaForCausalLM",
        heads=reading.grouped(fields, groups=-1),
        rope=reading.rope(fields, positions, ROPES),
        positions=positions,
    )


FAMILY = Family("llama", read, Gguf("llama", dense, permuted=True))
