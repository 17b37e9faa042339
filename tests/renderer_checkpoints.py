"""Checkpoint directories of chat models without weights: a small byte-level tokenizer with a family's added tokens, and its
chat template."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# How Qwen, DeepSeek and Llama split text before the merges: letters, digits, punctuation and line ends apart.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# special, then not special
CHATML = (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [])
QWEN = (CHATML[0], ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
QWEN35 = ([*QWEN[0], "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"], QWEN[1])
KIMI = (
    [
        *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
    ["<think>", "</think>"],
)
DEEPSEEK = (
    ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
    [
        *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ],
)
GLM = (
    ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"),
    ],
)
HARMONY = (
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "<|endoftext|>"],
    [],
)
LLAMA = (
    [
        *(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        "<|python_tag|>",
    ],
    [],
)


@functools.cache
def base() -> str:
    """A tokenizer without added tokens, as JSON. It learned from this project's tests: code and English."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text(), "\n\n\n\n  \n user\n\nassistant\n\n"] * 3, trainer)
    return str(tokenizer.to_str())


def tokenizer_of(family: tuple[list[str], list[str]]) -> Tokenizer:
    tokenizer = Tokenizer.from_str(base())
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in family[0]])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in family[1]])
    return tokenizer


def write(
    directory: Path,
    family: tuple[list[str], list[str]],
    template: str | None = None,
    *,
    end: str = "<|im_end|>",
    begin: str | None = None,
    card: dict[str, Any] | None = None,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(family)
    tokenizer.save(str(directory / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    if begin is not None:
        about["bos_token"] = begin
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(end)}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if card is not None:
        (directory / "etude.json").write_text(json.dumps(card))
    return directory


TEMPLATES = Path(__file__).parent / "data" / "templates"
# Family of a template: its tokens, how a turn ends, how a text begins, and what else ends a generation.
FAMILIES: dict[str, tuple[tuple[list[str], list[str]], str, str | None, tuple[str, ...]]] = {
    **{name: (QWEN, "<|im_end|>", None, ("<|endoftext|>",)) for name in ("qwen3", "qwen3_thinking", "qwen3_keeps")},
    **{name: (QWEN, "<|im_end|>", None, ("<|endoftext|>",)) for name in ("qwen3_instruct", "qwen2_5", "qwen3_coder")},
    "smollm2": (CHATML, "<|im_end|>", None, ()),
    "llama3_1": (LLAMA, "<|eot_id|>", "<|begin_of_text|>", ("<|eom_id|>",)),
    "kimi_k2": (KIMI, "<|im_end|>", None, ()),
    "deepseek_v3": (DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", ()),
    "deepseek_v3_0324": (DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", ()),
    "deepseek_v3_1": (DEEPSEEK, "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", ()),
    "harmony": (HARMONY, "<|return|>", None, ("<|call|>",)),
}


def checkpoint(directory: Path, name: str, card: dict[str, Any] | None = None, template: str | None = None) -> Path:
    """A checkpoint of a family, with the template of that name. `template`: another text of it."""
    family, end, begin, more = FAMILIES[name]
    text = (TEMPLATES / f"{name}.jinja").read_text() if template is None else template
    write(directory, family, text, end=end, begin=begin, card=card)
    tokenizer = tokenizer_of(family)
    ends = [tokenizer.token_to_id(token) for token in (end, *more)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory


trl = importlib.util.find_spec("trl")
needs_trl = pytest.mark.skipif(trl is None, reason="the package trl is not installed (make renderers)")
# Each published template of trl for a text model whose family's tokens are known here, and the format that is proved for it.
VERBATIM = {
    "qwen2_5": ("qwen2_5", "chatml"),
    "qwen2_5_training": ("qwen2_5", "chatml"),
    "qwen3": ("qwen3", "chatml"),
    "qwen3_training": ("qwen3", "chatml"),
    "qwen3_instruct_2507": ("qwen3", "chatml"),
    "qwen3_instruct_2507_training": ("qwen3", "chatml"),
    "qwen3_5_think": ("qwen3", "jinja"),
    "qwen3_5_think_training": ("qwen3", "jinja"),
    "qwen3_6": ("qwen3", "jinja"),
    "qwen3_8": ("qwen3", "jinja"),
    "nemotron_3_nano": ("qwen3", "jinja"),
    "llama3_1": ("llama3_1", "jinja"),
    "llama3_2": ("llama3_1", "jinja"),
    "gptoss": ("harmony", "jinja"),
    "deepseekv3": ("deepseek_v3", None),
}


def published(name: str) -> str:
    assert trl is not None
    return (Path(str(trl.origin)).parent / "chat_templates" / f"{name}.jinja").read_text()
