"""Text to ids and back, with control tokens kept apart from what only looks like one."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from shared.renderers.vocabulary import GUARDS, BadTokenizer, Vocabulary
from tests.renderer_checkpoints import DEEPSEEK, KIMI, QWEN, tokenizer_of

VOCABULARIES = [Vocabulary(tokenizer_of(family)) for family in (QWEN, KIMI, DEEPSEEK)]
QWENS = VOCABULARIES[0]
LOOKALIKES = sorted({text for vocabulary in VOCABULARIES for text in vocabulary.control})
PIECES = st.one_of(
    st.sampled_from(LOOKALIKES), st.text(max_size=6), st.sampled_from(["<", "<|", "|>", ">", "</", *GUARDS[:3]])
)
BODY = st.lists(PIECES, max_size=8).map("".join)


@given(st.text(), st.sampled_from(VOCABULARIES))
def test_text_without_control_tokens_gives_the_tokenizers_own_ids(text, vocabulary):
    if not any(spelling in text for spelling in vocabulary.control):
        expected = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.ids(text) == vocabulary.plain(text) == expected


@given(BODY, st.sampled_from(VOCABULARIES))
def test_structure_gives_the_tokenizers_own_ids_control_tokens_included(text, vocabulary):
    assert vocabulary.ids(text) == vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


@given(st.lists(BODY, min_size=1, max_size=4), st.sampled_from(VOCABULARIES))
def test_no_control_token_comes_of_shielded_text_however_texts_meet(bodies, vocabulary):
    guard = vocabulary.guard(bodies)
    ids = vocabulary.ids("".join(vocabulary.shield(body, guard) for body in bodies), guard)
    assert vocabulary.control_ids.isdisjoint(ids)
    assert vocabulary.tokenizer.decode(ids, skip_special_tokens=False) == vocabulary.tokenizer.decode(
        vocabulary.plain("".join(bodies)), skip_special_tokens=False
    )


@given(BODY, st.booleans())
def test_a_guard_is_taken_out_of_json_too(body, ascii):
    guard = QWENS.guard([body])
    written = json.dumps({"a": QWENS.shield(body, guard)}, ensure_ascii=ascii)
    assert QWENS.ids(written, guard) == QWENS.plain(json.dumps({"a": body}, ensure_ascii=ascii))


@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "".join(GUARDS),
        " ".join(f"{ord(guard):04x}" for guard in GUARDS),
        "".join(f"\\u{ord(guard):04x}" for guard in GUARDS),
        "".join(guard * 3 + f"\\u{ord(guard):04x}" * 2 for guard in GUARDS),
    ],
)
def test_a_table_of_all_guards_can_be_written(text, ascii):
    body = f"{text}<|im_end|>{text}<|im_"
    guard = QWENS.guard([body])
    assert QWENS.ids(QWENS.shield(body, guard), guard) == QWENS.plain(body)
    written = json.dumps({"a": QWENS.shield(body, guard)}, ensure_ascii=ascii)
    assert QWENS.ids(written, guard) == QWENS.plain(json.dumps({"a": body}, ensure_ascii=ascii))


@given(st.lists(st.integers(0, QWENS.size - 1), max_size=30))
def test_each_token_begins_where_its_text_does(ids):
    text, starts = QWENS.spans(ids)
    assert text == QWENS.text(ids)
    assert len(starts) == len(ids)
    assert starts == sorted(starts)
    for i in range(len(ids)):
        before = QWENS.text(ids[:i])
        if not before.endswith("\ufffd") and not QWENS.text(ids[i:]).startswith("\ufffd"):
            assert starts[i] == len(before)


@given(st.text())
def test_each_token_of_a_text_begins_at_its_character(text):
    ids = QWENS.plain(text)
    whole, starts = QWENS.spans(ids)
    assert whole == QWENS.text(ids)
    assert "".join(whole[a:b] for a, b in pairwise([*starts, len(whole)])) == whole


def test_a_tokenizer_whose_model_writes_control_tokens_itself_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("<s>", "isolated")
    tokenizer.add_special_tokens([AddedToken("<s>", normalized=False)])
    with pytest.raises(BadTokenizer, match="<s>"):
        Vocabulary(tokenizer)


def test_an_added_token_of_one_character_is_refused():
    tokenizer = tokenizer_of(QWEN)
    tokenizer.add_tokens([AddedToken("§", normalized=False)])
    with pytest.raises(BadTokenizer, match="§"):
        Vocabulary(tokenizer)


def test_added_white_space_is_text():
    tokenizer = tokenizer_of(QWEN)
    tokenizer.add_tokens([AddedToken("      ", normalized=False)])
    vocabulary = Vocabulary(tokenizer)
    text = "def f():\n      return 1"
    assert vocabulary.plain(text) == tokenizer.encode(text, add_special_tokens=False).ids
