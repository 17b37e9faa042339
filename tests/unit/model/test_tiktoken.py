"""A tokenizer in tiktoken's form becomes a tokenizer.json that gives the same tokens."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from shared.model.families import kimi_k2
from shared.model.fields import UnknownModel
from shared.model.tiktoken_file import _LETTERS, read_ranks, tokenizer_of, write_tokenizer

CORPUS = [
    "def f(x):\n    return x + 12345\n\n\tclass ABC: pass\r\n",
    "The quick brown fox's dog DON'T jump over 007 lazy  spaces   and we'll see.",
    "naïve façade — übergrößenträger, 你好世界。你好 こんにちは مرحبا 안녕 ñandú",
    "import os, sys\nfor i in range(10):\n    print(f'{i:>8}', i ** 2)\n" * 3,
]
NAMED = {"0": "[BOS]", "1": "[EOS]", "2": "<|im_end|>", "7": "<|tool_call_begin|>"}


def trained() -> dict[bytes, int]:
    """Ranks of a small vocabulary: the bytes first, then what merging made."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(kimi_k2.PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=460, initial_alphabet=alphabet))
    found = tokenizer.get_vocab()
    bytes_of = {letter: byte for byte, letter in _LETTERS.items()}
    tokens = sorted(found, key=lambda token: found[token])
    return {bytes(bytes_of[letter] for letter in token): rank for rank, token in enumerate(tokens)}


RANKS = trained()


def merged(piece: bytes) -> list[int]:
    """As tiktoken does it: a known piece as it is; else the pair of lowest rank, the first of equals, again and again."""
    if piece in RANKS:
        return [RANKS[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]
        if not pairs:
            return [RANKS[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def special() -> dict[int, dict[str, Any]]:
    return {len(RANKS) + int(i): {"content": text, "special": text[0] == "["} for i, text in NAMED.items()}


TOKENIZER = tokenizer_of(RANKS, special(), kimi_k2.PATTERN, kimi_k2.RESERVED)
PIECES = regex.compile(kimi_k2.PATTERN, regex.VERSION1)
TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from([*CORPUS[1].split(), *" \n\t'", "\r\n", "12345", "DON'T", "aBC", "你好", "é", "x_1", "ÜBER"])
).map("".join)


@settings(max_examples=500, deadline=None)
@given(TEXTS)
def test_text_becomes_the_tokens_that_tiktoken_makes_of_it(text: str) -> None:
    pieces = PIECES.findall(text)
    assert "".join(pieces) == text
    wanted = [i for piece in pieces for i in merged(piece.encode())]
    assert TOKENIZER.encode(text).ids == wanted
    assert TOKENIZER.decode(wanted) == text


def test_special_tokens_follow_the_ranks_and_the_unnamed_are_reserved() -> None:
    first = len(RANKS)
    assert TOKENIZER.get_vocab_size() == first + 256
    assert TOKENIZER.encode("[BOS]a<|im_end|>").ids == [first, RANKS[b"a"], first + 2]
    assert TOKENIZER.id_to_token(first + 3) == f"<|reserved_token_{first + 3}|>"


def folder_of(directory: Path, lines: list[str] | None = None, **config: Any) -> Path:
    found = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (directory / "tiktoken.model").write_text("\n".join(found if lines is None else lines) + "\n")
    about = {
        "added_tokens_decoder": {str(i): token for i, token in special().items()},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory


def test_the_folder_is_read_by_transformers_without_code_of_its_own(tmp_path: Path) -> None:
    kimi_k2.tokenizer(folder_of(tmp_path))
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert read("你好 fox's[EOS]", add_special_tokens=False)["input_ids"] == TOKENIZER.encode("你好 fox's[EOS]").ids
    assert (read.bos_token_id, read.eos_token_id) == (len(RANKS), len(RANKS) + 1)


@pytest.mark.parametrize(
    ("lines", "config", "said"),
    [
        (["not base64!! 0"], {}, r"tiktoken\.model: no tiktoken file"),
        (["", "YQ== 0"], {}, r"tiktoken\.model: no tiktoken file"),
        (["YQ== 0", "Yg== 2"], {}, r"tiktoken\.model: 2 tokens; expected one for each rank"),
        (["YQ== 0", "Yg== 1"], {}, r"the byte 0x00 is no token; expected all 256"),
        (None, {"added_tokens_decoder": {"5": {"content": "x"}}}, r"added token 5; allowed: \d+ to \d+"),
        (None, {"added_tokens_decoder": []}, r"tokenizer_config\.json: cannot be read"),
    ],
)
def test_what_is_no_such_tokenizer_is_refused_by_name(
    lines: list[str] | None, config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, lines, **config)
    with pytest.raises(UnknownModel, match=said):
        write_tokenizer(folder, pattern=kimi_k2.PATTERN, reserved=256)
    assert not (folder / "tokenizer.json").exists()


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"tiktoken\.model: no tiktoken file"):
        read_ranks(tmp_path / "tiktoken.model")
