"""Kimi K2: DeepSeek-V3 under another name, with one routing group, without MTP layers, and with a tiktoken tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shared.model.config import ModelConfig
from shared.model.families import Family, deepseek_v3
from shared.model.fields import Fields

SERVING = replace(deepseek_v3.SERVING, model_type="deepseek_v3")  # SGLang would ask the checkpoint for its own code


# How its tokenizer splits text: Chinese apart, words with the ending of a contraction, three digits at most.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_WORD, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
RESERVED = 256  # special tokens after the ranks


def read(fields: Fields) -> ModelConfig:
    return deepseek_v3.read_as("kimi_k2", SERVING, fields)


def tokenizer(folder: Path) -> None:
    from shared.model import tiktoken_file

    tiktoken_file.write_tokenizer(folder, pattern=PATTERN, reserved=RESERVED)


FAMILY = Family("kimi_k2", read, tokenizer=tokenizer)
