"""Qwen3, dense: grouped-query attention with an RMS norm on every query and key head, no biases."""

from __future__ import annotations

from shared.model.config import ModelConfig
from shared.model.families import Family, Gguf
from shared.model.families.parts import reading
from shared.model.families.parts.llama_cpp import dense
from shared.model.fields import Fields

ROPES = ("default", "yarn")
ONLY = {"qkv_bias": (False, None), "use_qk_norm": (True, None)}  # old names that some checkpoints still carry


def read(fields: Fields) -> ModelConfig:
    reading.refuse(fields, ONLY)
    positions = fields.whole("max_position_embeddings", 32768)
    return reading.model(
        fields,
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        heads=reading.grouped(fields, size=128),
        rope=reading.rope(fields, positions, ROPES),
        positions=positions,
        qk_norm=True,
    )


FAMILY = Family("qwen3", read, Gguf("qwen3", dense))
