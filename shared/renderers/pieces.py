r"""Encodes ASCII text piece by piece, several times faster than the tokenizer, to exactly the same ids.

A byte-level BPE tokenizer first splits a text into pieces (`    return`, ` total`, `(`) and then encodes each piece by itself.
The split, a Unicode regular expression, takes most of its time. Tool outputs differ, but their pieces repeat. So for ASCII text
this module splits with Python's `re`, encodes each distinct piece once with the tokenizer's own model, and keeps its ids.

Invariants:
- `Pieces.of` returns None unless the tokenizer's JSON names a split of SPLITS, and nothing else changes ASCII text.
- A pattern of SPLITS matches every ASCII character, and splits ASCII text where the tokenizer does. In ASCII mode `\s` of `re`
  means what it means to the tokenizer: space and U+0009 to U+000D. U+001C to U+001F are no white space to either.
- At most KEPT pieces of at most LONGEST characters are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE, Model

KEPT = 1 << 16  # pieces: some 20 MB at most
LONGEST = 64  # characters of a piece that is kept
# Normal forms of Unicode: ASCII text is in all of them.
HARMLESS = {"NFC", "NFD", "NFKC", "NFKD"}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ASCII_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+|%s| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ASCII_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+|%s| ?[^\sA-Za-z0-9]+|\s+(?!%s)|\s+"


def _split_and_bytes(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _BYTES]}


# Pre-tokenizers as tokenizer.json writes them, and the same split of ASCII text.
SPLITS: tuple[tuple[dict[str, Any], str], ...] = (
    (_GPT2, _ASCII_GPT2 % (r" ?[0-9]+", r"\S")),
    # SmolLM: each digit by itself, and white space before a digit ends a text of its own
    ({"type": "Sequence", "pretokenizers": [_DIGITS, _GPT2]}, _ASCII_GPT2 % (r"[0-9]", r"[^\s0-9]")),
    (_split_and_bytes(_WORDS % r"\p{N}"), _ASCII_WORDS % r"[0-9]"),  # Qwen 2, 2.5, 3
    (_split_and_bytes(_WORDS % r"\p{N}{1,3}"), _ASCII_WORDS % r"[0-9]{1,3}"),  # Llama 3
)


class Pieces(dict[str, tuple[int, ...]]):
    """A split of ASCII text, and the ids of its pieces as far as they are known."""

    def __init__(self, pattern: str, model: Model) -> None:
        super().__init__()
        self._split = re.compile(pattern, re.ASCII).findall
        self._model = model

    @classmethod
    def of(cls, tokenizer: Tokenizer, written: Mapping[str, Any]) -> Pieces | None:
        """Return the pieces of a tokenizer without added tokens, or None if it may split or change ASCII text in another way.
        `written`: the tokenizer as JSON."""
        pattern = next((ours for theirs, ours in SPLITS if theirs == _bare(written.get("pre_tokenizer"))), None)
        exact = isinstance(tokenizer.model, BPE) and not tokenizer.model.dropout
        if pattern is None or not exact or not _harmless(written.get("normalizer")):
            return None
        if written.get("truncation") or written.get("padding"):
            return None
        return cls(pattern, tokenizer.model)

    def ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of an ASCII text."""
        return tuple(chain.from_iterable(map(self.__getitem__, self._split(text))))

    def __missing__(self, piece: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize(piece.translate(_SPELLING)))
        if len(piece) <= LONGEST:
            if len(self) >= KEPT:
                self.clear()
            self[piece] = ids
        return ids


def _bare(pre_tokenizer: Any) -> Any:
    """Return a pre-tokenizer without `trim_offsets`, which moves places in the text and changes no id."""
    if isinstance(pre_tokenizer, Mapping):
        return {key: _bare(value) for key, value in pre_tokenizer.items() if key != "trim_offsets"}
    return [_bare(one) for one in pre_tokenizer] if isinstance(pre_tokenizer, list) else pre_tokenizer


def _harmless(normalizer: Any) -> bool:
    """Return whether a normalizer leaves ASCII text as it is."""
    if normalizer is None:
        return True
    if normalizer.get("type") == "Sequence":
        return all(map(_harmless, normalizer.get("normalizers", ())))
    return normalizer.get("type") in HARMLESS


# How byte-level vocabularies spell the ASCII characters that cannot be printed.
_SPELLING = {code: chr(0x100 + i) for i, code in enumerate([*range(0x21), 0x7F])}
