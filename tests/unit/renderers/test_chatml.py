"""ChatML with Hermes' calls: what stands where, and what a card may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.environments import Brief, Message, Result, ToolSpec
from shared.renderers import Exchange, Renderer, Tail
from shared.renderers.chat import UnfitCheckpoint
from shared.renderers.formats.chatml import ChatML
from shared.renderers.registry import load_renderer
from tests.renderer_checkpoints import CHATML, QWEN, write

PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "from": {"type": "integer"}},
    "required": ["path"],
}
READ = ToolSpec("read", "Reads a file.", PARAMETERS)
BRIEF = Brief((Message("user", "Repair a.py"),), (READ,))
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'
THOUGHT = "<think>\nhm\n</think>\n\n"


def chatml(directory: Path, family: Any = QWEN, **card: Any) -> ChatML:
    write(directory, family, card={"format": "chatml", "context": 4096, **card})
    renderer = load_renderer(directory)
    assert isinstance(renderer, ChatML)
    return renderer


def tail(renderer: ChatML, said: str, *, end: bool = True) -> Tail:
    completion = renderer.vocabulary.ids(said + "<|im_end|>" * end)
    return Tail(renderer.opening(BRIEF), completion, BRIEF)


def answer(renderer: ChatML, said: str, *results: Result, end: bool = True) -> str | None:
    ids = renderer.answers(tail(renderer, said, end=end), results)
    return None if ids is None else renderer.text(ids)


PROMPT = "<|im_start|>assistant\n"
A, B, ASKED = Result(call="1", tool="read", text="x"), Result(call="2", tool="read", text="y"), Result(text="Well?")
TOLD = "<tool_response>\n{}\n</tool_response>"


def test_results_that_follow_one_another_share_a_turn_of_the_user(tmp_path):
    both = f"\n<|im_start|>user\n{TOLD.format('x')}\n{TOLD.format('y')}<|im_end|>\n{PROMPT}"
    assert answer(chatml(tmp_path), CALL + "\n" + CALL, A, B) == both


def test_or_have_a_turn_of_their_own_where_the_card_says_so(tmp_path):
    turns = "<|im_start|>tool\nx<|im_end|>\n<|im_start|>tool\ny<|im_end|>\n"
    assert answer(chatml(tmp_path, results="tool"), CALL, A, B) == f"\n{turns}{PROMPT}"


def test_a_message_without_a_call_is_the_users(tmp_path):
    turns = f"<|im_start|>user\n{TOLD.format('x')}<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n"
    assert answer(chatml(tmp_path), CALL, A, ASKED) == f"\n{turns}{PROMPT}"


@pytest.mark.parametrize(
    ("said", "closed"),
    [("I look", "<|im_end|>\n"), ("<think>\nhm", "\n</think>\n\n<|im_end|>\n"), (CALL[:20], "<|im_end|>\n")],
)
def test_a_turn_that_was_cut_short_is_closed(tmp_path, said, closed):
    text = answer(chatml(tmp_path), said, ASKED, end=False)
    assert text == f"{closed}<|im_start|>user\nWell?<|im_end|>\n{PROMPT}"


def test_thinking_that_the_prompt_opened_is_closed_too(tmp_path):
    renderer = chatml(tmp_path, thinking="open")
    assert renderer.text(renderer.opening(BRIEF)).endswith("<think>\n")
    assert answer(renderer, "hm", ASKED, end=False).startswith("\n</think>\n\n<|im_end|>")
    assert renderer.reading(renderer.vocabulary.ids(f"hm {CALL}"), renderer.opening(BRIEF)).calls == ()


def test_the_user_does_not_speak_after_thinking_that_the_template_would_drop(tmp_path):
    renderer = chatml(tmp_path, thinking="model", drops_thinking=True)
    assert answer(renderer, THOUGHT + CALL, A) is not None
    assert answer(renderer, THOUGHT + CALL, A, ASKED) is None
    assert renderer.asking(tail(renderer, THOUGHT + "So."), [], "Well?") is None
    assert renderer.asking(tail(renderer, "So."), [], "Well?") is not None


def test_a_history_forgets_the_thinking_before_the_users_last_message_alone(tmp_path):
    renderer = chatml(tmp_path, thinking="model", drops_thinking=True)
    first, second, third = (THOUGHT.replace("hm", word) for word in ("first", "second", "third"))
    turns = [(first + CALL, (A,)), (second + "So.", (ASKED,)), (third + CALL, (B,))]
    history = [Exchange(tuple(renderer.vocabulary.ids(said + "<|im_end|>")), results) for said, results in turns]
    text = renderer.text(renderer.opening(BRIEF, history=history))
    assert "first" not in text
    assert "second" not in text
    assert text.endswith(
        f"<|im_start|>assistant\nSo.<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n<think>\nthird\n</think>\n\n"
        f"{CALL}<|im_end|>\n<|im_start|>user\n{TOLD.format('y')}<|im_end|>\n{PROMPT}"
    )


def test_a_summary_stands_in_the_users_message_as_it_was_sampled(tmp_path):
    renderer = chatml(tmp_path)
    sampled = renderer.vocabulary.ids(f"{THOUGHT}I read a.py; é is wrong.<|im_end|>")
    kept = renderer.kept(sampled)
    assert renderer.text(kept) == "I read a.py; é is wrong."
    opening = renderer.opening(BRIEF, kept)
    assert any(tuple(opening[i : i + len(kept)]) == kept for i in range(len(opening)))
    told = "Repair a.py\n\nYou have worked on this before. Your own summary of that work:\nI read a.py; é is wrong."
    assert renderer.text(opening).endswith(f"{told}<|im_end|>\n{PROMPT}")


def test_what_is_kept_holds_no_control_token_and_no_call(tmp_path):
    renderer = chatml(tmp_path)
    kept = renderer.kept(renderer.vocabulary.ids(f"a <|im_start|>b</think> {CALL} c<|im_end|>"))
    assert renderer.vocabulary.control_ids.isdisjoint(kept)
    assert CALL.split()[1] not in renderer.text(kept)


def test_short_words_tell_of_a_tool_in_a_line(tmp_path):
    renderer = chatml(tmp_path, CHATML, tools="short", calls="hermes-list")
    text = renderer.text(renderer.opening(BRIEF))
    assert "Tools:\nread(path: string, from?: integer) - Reads a file.\nTo call one, write:\n<tool_call>[" in text


def test_a_reading_says_what_is_text_thinking_and_final(tmp_path):
    renderer = chatml(tmp_path)
    ids = renderer.vocabulary.ids(f"{THOUGHT}It is repaired.<|im_end|>")
    reading = renderer.reading(ids, [])
    assert (reading.thinking, reading.text, reading.calls) == ("hm", "It is repaired.", ())
    assert renderer.text(ids[slice(*reading.final)]).strip() == "It is repaired."
    assert renderer.reading([], []).final is None


def test_calls_of_two_turns_have_different_ids(tmp_path):
    renderer = chatml(tmp_path)
    first = tail(renderer, CALL)
    context = [*first.context, *first.completion, *renderer.answers(first, [A])]
    ids = [renderer.reading(first.completion, at).calls[0].id for at in (first.context, context)]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("brief", "words"),
    [
        (Brief((Message("system", "a"),), ()), ["messages", "user"]),
        (Brief((Message("user", "a"), Message("system", "b")), ()), ["messages[1].role", "'system'", "first"]),
        (Brief((Message("user", "a"),), (ToolSpec('re"ad', "", {}),)), ["tools", 're"ad', "letters"]),
        (Brief((Message("user", "a"),), (READ, READ)), ["tools", "twice"]),
        (Brief((Message("user", "word " * 9000),), ()), ["tokens", "4032", "4096"]),
    ],
)
def test_a_brief_that_cannot_be_written_is_an_objection(tmp_path, brief, words):
    said = chatml(tmp_path).objection(brief)
    assert said is not None
    assert all(word in said for word in words), said
    assert chatml(tmp_path).objection(BRIEF) is None


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"calls": "pythonic"}, ["calls", "'pythonic'", "hermes"]),
        ({"calls": "kimi"}, ["calls", "'kimi'", "'hermes'"]),
        ({"tools": "long"}, ["tools", "long"]),
        ({"thinking": True}, ["thinking"]),
        ({"context": 8}, ["context"]),
    ],
)
def test_a_card_that_cannot_be_followed_is_refused_by_field(tmp_path, card, words):
    with pytest.raises(UnfitCheckpoint) as refused:
        chatml(tmp_path, **card)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_tokenizer_without_the_forms_tokens_is_refused_by_name(tmp_path):
    write(tmp_path, (["<|endoftext|>"], []), end="<|endoftext|>", card={"format": "chatml", "context": 4096})
    with pytest.raises(UnfitCheckpoint, match=r"<\|im_start\|>"):
        ChatML.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnfitCheckpoint, match="no tokenizer can be read"):
        ChatML.load(tmp_path)


def test_it_keeps_the_protocol(tmp_path):
    renderer: Renderer = chatml(tmp_path)
    assert renderer.stop_tokens
    assert json.dumps(renderer.text(renderer.opening(BRIEF)))
