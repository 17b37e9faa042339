"""Qwen2 and Qwen2.5, Coder included: biases on query, key and value, no head norms. Its sliding window stays unused."""

from __future__ import annotations

from shared.model.config import ModelConfig
from shared.model.families import Family, Gguf
from shared.model.families.parts import reading
from shared.model.families.parts.llama_cpp import dense
from shared.model.fields import Fields

ROPES = ("default", "yarn")


def read(fields: Fields) -> ModelConfig:
    reading.refuse(fields, {"attention_bias": (False, True, None)})  # transformers' Qwen2 does not look at it
    positions = fields.whole("max_position_embeddings", 32768)
    return reading.model(
        fields,
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        heads=reading.grouped(fields),
        rope=reading.rope(fields, positions, ROPES),
        positions=positions,
        qkv_bias=True,
    )


FAMILY = Family("qwen2", read, Gguf("qwen2", dense))
