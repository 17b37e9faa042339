"""ASCII text encoded piece by piece gives the tokenizer's own ids."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from shared.renderers import pieces
from shared.renderers.pieces import SPLITS, Pieces
from shared.renderers.vocabulary import Vocabulary
from tests.renderer_checkpoints import DEEPSEEK, KIMI, LLAMA, QWEN, base, tokenizer_of

ASCII = "".join(map(chr, range(128)))
SPACES = "\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f "
WORDS = ("s", "S", "t", "T", "re", "Re", "rE", "RE", "ve", "VE", "m", "M", "ll", "Ll", "LL", "d", "D", "l", "r", "v")
TEXT = st.lists(
    st.one_of(
        st.text(st.sampled_from(ASCII), max_size=8),
        st.text(st.sampled_from(SPACES), max_size=8),
        st.text(st.sampled_from("0123456789"), max_size=12),
        st.sampled_from([mark + word for word in WORDS for mark in "' "]),
        st.sampled_from(["return self.total", "    def __init__(", "HTTPServer", '": "', "\r\n\r\n", "->", "===="]),
    ),
    max_size=12,
).map("".join)


def split_by(pre_tokenizer, **model) -> Tokenizer:
    """The model of the tests' checkpoints, with another split of text before it."""
    written = json.loads(base())
    whole = json.dumps(pre_tokenizer).replace('"ByteLevel"', '"ByteLevel", "trim_offsets": true')
    changed = {**written, "pre_tokenizer": json.loads(whole), "model": {**written["model"], **model}}
    return Tokenizer.from_str(json.dumps(changed))


def of(tokenizer: Tokenizer) -> Pieces | None:
    return Pieces.of(tokenizer, json.loads(tokenizer.to_str()))


TOKENIZERS = [split_by(theirs) for theirs, _ in SPLITS]
BOTH = [(tokenizer, of(tokenizer)) for tokenizer in [*TOKENIZERS, split_by(SPLITS[-1][0], ignore_merges=True)]]


@given(TEXT, st.sampled_from(range(len(BOTH))))
def test_ids_are_the_tokenizers(text, which):
    tokenizer, found = BOTH[which]
    assert list(found.ids(text)) == tokenizer.encode(text, add_special_tokens=False).ids


@given(TEXT, st.sampled_from(range(len(SPLITS))))
def test_a_text_is_split_where_the_tokenizer_splits_it(text, which):
    tokenizer, found = BOTH[which]
    theirs = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found._split(text) == theirs


@pytest.mark.parametrize("which", range(len(SPLITS)))
def test_every_pair_of_characters_gives_the_tokenizers_ids(which):
    tokenizer, found = BOTH[which]
    texts = ["".join(pair) for pair in itertools.product(ASCII, repeat=2)]
    texts += ["".join(three) for three in itertools.product("a1. \n\r\x0b\x1f'sS", repeat=3)]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    assert [list(found.ids(text)) for text in texts] == [one.ids for one in encoded]


@pytest.mark.parametrize("family", [QWEN, KIMI, DEEPSEEK, LLAMA])
def test_a_vocabulary_gives_the_tokenizers_ids_of_texts_of_both_kinds(family):
    vocabulary = Vocabulary(tokenizer_of(family))
    assert vocabulary._pieces is not None
    for text in (ASCII, ASCII * 3, "x" * 1000, "naïve", "a\x85b\u2028c", f"{ASCII}é{ASCII}", "\u017f's 'ſ"):
        assert vocabulary.plain(text) == vocabulary._plain.encode(text, add_special_tokens=False).ids


def test_the_number_of_kept_pieces_is_bounded(monkeypatch):
    monkeypatch.setattr(pieces, "KEPT", 10)
    tokenizer, found = BOTH[0][0], of(TOKENIZERS[0])
    text = " ".join(f"word{chr(97 + i % 26) * (i % 9 + 1)}" for i in range(200)) + "x" * 100
    assert list(found.ids(text)) == tokenizer.encode(text).ids
    assert 0 < len(found) <= 10
    assert max(map(len, found)) <= pieces.LONGEST


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Digits", "individual_digits": True}},
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "_"}]}},
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
    ],
    ids=str,
)
def test_any_other_tokenizer_keeps_its_own_way(change):
    assert of(Tokenizer.from_str(json.dumps({**json.loads(base()), **change}))) is None


def test_a_model_that_drops_merges_at_random_keeps_its_own_way():
    assert of(split_by(SPLITS[0][0], dropout=0.1)) is None
