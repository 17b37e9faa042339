"""The tokenizer in a GGUF file's metadata, as the files that Hugging Face's loaders read.

llama.cpp stores a vocabulary, merges and the name of a way to split text (`tokenizer.ggml.pre`); what the name means is code
of its own. The table below holds the published form of each: the one that the model was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from shared.model.fields import UnknownModel

_KEY = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4  # token types; others are found by merging
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _by_regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _single_digits() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


# How each `tokenizer.ggml.pre` splits text before the merges.
_SPLITS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "llama-bpe": lambda: _by_regex(_LLAMA3),
    "smaug-bpe": lambda: _by_regex(_LLAMA3),  # older converters' name for the same
    "qwen2": lambda: _by_regex(_QWEN2),
    "deepseek-r1-qwen": lambda: _by_regex(_QWEN2),
}
_NFC = {"qwen2", "deepseek-r1-qwen"}  # normalise first
_WHOLE_WORDS = {"llama-bpe", "smaug-bpe"}  # a piece that is a token is taken as it is, without merges


def write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and, if the file has one, chat_template.jinja. Raises
    UnknownModel for any other kind of tokenizer, naming it."""
    tokenizer = tokenizer_of(meta)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = _special_ids(meta)
    token = {name: meta[f"{_KEY}tokens"][i] for name, i in ids.items() if name in ("bos", "eos", "pad", "unk")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _begins(meta),
        "model_max_length": meta.get(f"{meta['general.architecture']}.context_length"),
        **{f"{name}_token": text for name, text in token.items()},
    }
    _write_json(folder / "tokenizer_config.json", config)
    stops = [ids[name] for name in ("eos", "eot") if name in ids]
    generation = {"eos_token_id": list(dict.fromkeys(stops)), "do_sample": True}
    generation |= {f"{name}_token_id": ids[name] for name in ("bos", "pad") if name in ids}
    _write_json(folder / "generation_config.json", generation)
    if template := meta.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template)


def tokenizer_of(meta: Mapping[str, Any]) -> Tokenizer:
    kind, split = meta.get(f"{_KEY}model"), meta.get(f"{_KEY}pre")
    if kind != "gpt2":
        raise UnknownModel(
            f"GGUF: {_KEY}model is {kind!r:.80}; allowed: 'gpt2' (byte-level BPE). Import the Hugging Face directory instead"
        )
    if split not in _SPLITS:
        raise UnknownModel(
            f"GGUF: {_KEY}pre is {split!r:.80}; allowed: {', '.join(_SPLITS)}. Import the Hugging Face directory instead"
        )
    tokens = meta[f"{_KEY}tokens"]
    merges = [_pair(merge) for merge in meta[f"{_KEY}merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise UnknownModel(f"GGUF: {_KEY}tokens has {len(tokens) - len(vocabulary)} tokens twice; allowed: each once")
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in _WHOLE_WORDS))
    except Exception as error:  # the library raises nothing narrower
        raise UnknownModel(f"GGUF: {_KEY}merges do not fit {_KEY}tokens ({error})") from None
    if split in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _SPLITS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    for i, of_type in enumerate(meta.get(f"{_KEY}token_type", ())):
        if of_type in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(tokens[i], normalized=False, special=of_type == _CONTROL)])
    if _begins(meta):
        bos = _special_ids(meta)["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A {tokens[bos]} $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _begins(meta: Mapping[str, Any]) -> bool:
    """Whether a text begins with the BOS token."""
    return bool(meta.get(f"{_KEY}add_bos_token", False)) and f"{_KEY}bos_token_id" in meta


def _special_ids(meta: Mapping[str, Any]) -> dict[str, int]:
    """Raises UnknownModel for an id beyond the vocabulary."""
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "pad": "padding", "unk": "unknown"}
    ids = {name: int(meta[f"{_KEY}{key}_token_id"]) for name, key in keys.items() if f"{_KEY}{key}_token_id" in meta}
    for name, i in ids.items():
        if not 0 <= i < len(meta[f"{_KEY}tokens"]):
            raise UnknownModel(
                f"GGUF: {_KEY}{keys[name]}_token_id is {i}; allowed: below {len(meta[f'{_KEY}tokens'])} tokens"
            )
    return ids


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
