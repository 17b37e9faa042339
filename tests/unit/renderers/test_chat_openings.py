"""Openings, held against transformers; and, where the package `trl` is installed (`make renderers`), the published templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.environments import Brief, Message, Result, ToolSpec
from shared.renderers import Tail
from shared.renderers.chat import UnfitCheckpoint, schema_of, user
from shared.renderers.detect import format_of
from shared.renderers.formats.chatml import ChatML
from shared.renderers.formats.jinja import Jinja
from shared.renderers.template import ChatTemplate
from tests.renderer_checkpoints import FAMILIES, TEMPLATES, VERBATIM, checkpoint, needs_trl, published

TOOLS = (
    ToolSpec("read", "Reads a <file> é.", {"type": "object", "properties": {"path": {"type": "string"}}}, "reads"),
    ToolSpec("submit", "Submits.", {"type": "object", "properties": {}}, "ends"),
)
PROVED = {
    "qwen3": ("chatml", "hermes"),
    "qwen3_thinking": ("chatml", "hermes"),
    "qwen3_keeps": ("chatml", "hermes"),
    "qwen3_instruct": ("chatml", "hermes"),
    "qwen2_5": ("chatml", "hermes"),
    "smollm2": ("chatml", "hermes"),
    "qwen3_coder": ("jinja", "qwen-xml"),
    "llama3_1": ("jinja", "llama"),
    "kimi_k2": ("jinja", "kimi"),
    "deepseek_v3_1": ("jinja", "deepseek"),
    "harmony": ("jinja", "harmony"),
}
# Published template of `trl` for each of ours that says the same.
PUBLISHED = {
    "qwen3": "qwen3",
    "qwen3_keeps": "qwen3_training",
    "qwen3_instruct": "qwen3_instruct_2507",
    "qwen2_5": "qwen2_5",
    "llama3_1": "llama3_1",
    "deepseek_v3_0324": "deepseekv3",
}


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def loaded(directory: Path) -> ChatML | Jinja:
    return (ChatML if json.loads((directory / "etude.json").read_text())["format"] == "chatml" else Jinja).load(
        directory
    )


def detected(directory: Path) -> ChatML | Jinja:
    """As an import writes the card."""
    card = {"context": 1 << 16, **format_of(directory)}
    (directory / "etude.json").write_text(json.dumps(card))
    return loaded(directory)


def theirs(directory: Path, brief: Brief) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": message.role, "content": message.content} for message in brief.messages]
    tools = [schema_of(tool) for tool in brief.tools] or None
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    return [int(id) for id in ids]


def briefs(tools: bool = True) -> list[Brief]:
    texts = ["\nFix a.py.  ", "x", "ß😀\n\n```\ndef f():\n\treturn 1\n```", "  "]
    return [
        Brief((*([Message("system", system)] if system is not None else []), Message("user", text)), offered)
        for text in texts
        for system in (None, "Be good.\n")
        for offered in ((), TOOLS)[: 1 + tools]
    ]


@pytest.mark.parametrize("name", list(PROVED))
def test_an_opening_is_the_one_that_transformers_writes(tmp_path, name):
    renderer = detected(checkpoint(tmp_path, name))
    assert (renderer.name, renderer.calls.name) == PROVED[name]
    for brief in briefs(tools=name != "smollm2"):
        assert renderer.objection(brief) is None
        assert renderer.opening(brief) == theirs(tmp_path, brief)


def test_a_template_without_a_word_for_tools_gets_them_in_the_system_message(tmp_path):
    renderer = detected(checkpoint(tmp_path, "smollm2"))
    text = renderer.text(renderer.opening(briefs()[1]))
    assert text.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n\n# Tools"
    )
    assert '"name": "read"' in text


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_0324"])
def test_a_template_that_writes_turns_by_what_went_before_is_refused_with_the_way_out(tmp_path, name):
    with pytest.raises(UnfitCheckpoint) as refused:
        format_of(checkpoint(tmp_path, name))
    assert all(word in str(refused.value) for word in ("1 turn", "allowed", "--format renderers:deepseek-v3"))


@pytest.mark.parametrize(
    ("name", "template", "words"),
    [
        ("qwen3", "{{ messages | length }}" + TURNS, ["written otherwise"]),
        ("qwen3", TURNS.replace("messages", "messages[-2:]"), ["otherwise"]),
        ("qwen3", TURNS.replace("<|im_end|>", ""), ["no stop token", "<|im_end|>"]),
        ("qwen3", TURNS.replace("m.content", "m.content | upper"), ["leaves out or rewrites what was said to"]),
        ("qwen3", TURNS.replace("m.content", "m.content[:9]"), ["leaves out or rewrites what was said to"]),
        ("smollm2", TURNS.replace("<|im_start|>", "<|turn|>"), ["<|turn|>", "added tokens"]),
        ("qwen3", "", ["leaves out or rewrites what was said to"]),
        ("qwen3", "{{ raise_exception('only users') }}", ["only users"]),
        ("qwen3", "{% if %}", ["cannot be read"]),
    ],
)
def test_a_template_that_cannot_be_appended_to_is_refused_by_reason(tmp_path, name, template, words):
    with pytest.raises(UnfitCheckpoint) as refused:
        format_of(checkpoint(tmp_path, name, template=template))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_checkpoint_without_a_template_or_a_tokenizer_is_refused(tmp_path):
    checkpoint(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UnfitCheckpoint, match=r"no chat template.*--format chatml"):
        format_of(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnfitCheckpoint, match=r"no tokenizer\.json"):
        format_of(tmp_path)


@pytest.mark.parametrize("name", [name for name in PROVED if name != "smollm2"])
def test_answers_are_what_the_template_writes_behind_a_turn(tmp_path, name):
    """One turn with a call, rendered whole by transformers, against an opening, what was sampled, and an answer."""
    renderer = detected(checkpoint(tmp_path, name))
    template = ChatTemplate.load(tmp_path)
    objects, nothing = template.calls_as
    arguments = {"path": "a.py"}
    function = {"name": "read", "arguments": arguments if objects else json.dumps(arguments)}
    call = {"id": "functions.read:0", "type": "function", "function": function}
    brief = Brief((Message("user", "Fix it."),), TOOLS)
    messages = [
        user("Fix it."),
        {"role": "assistant", "content": nothing, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.read:0", "name": "read", "content": "x = 1\n"},
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tools = [schema_of(tool) for tool in TOOLS]
    whole = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    opening = renderer.opening(brief)
    same = next((i for i, pair in enumerate(zip(opening, whole, strict=False)) if len(set(pair)) > 1), len(opening))
    stop = next(i for i in range(same, len(whole)) if whole[i] in renderer.stop_tokens)
    head, completion = whole[:same], whole[same : stop + 1]
    reading = renderer.reading(completion, head, TOOLS)
    assert [(one.name, one.arguments, one.error) for one in reading.calls] == [("read", arguments, None)]
    result = Result(call=reading.calls[0].id, tool="read", text="x = 1\n")
    answer = renderer.answers(Tail(head, completion, brief), [result])
    if name == "qwen3_thinking":  # its prompt opens a block of thinking that a turn without thinking does not have
        answer = (
            answer[: -len(renderer.vocabulary.ids("<think>\n"))] + whole[-len(renderer.vocabulary.ids("<think>\n")) :]
        )
    assert [*head, *completion, *answer] == whole


@pytest.mark.parametrize("name", ["kimi_k2", "harmony", "qwen3_coder"])
def test_a_result_or_a_tools_name_may_hold_any_word(tmp_path, name):
    """The bridge's own mark, and what only looks like a control token."""
    renderer = detected(checkpoint(tmp_path, name))
    brief = Brief((Message("user", "a"),), TOOLS)
    tail = Tail(renderer.opening(brief), [renderer.stop_tokens[-1]], brief)
    spelled = renderer.vocabulary.control
    told = [("f", "x"), (f"f{max(spelled)}", f"qzxkwa qzxkwaa {' '.join(spelled)}")]
    plain, evil = (renderer.answers(tail, [Result(call="c", tool=tool, text=text)]) for tool, text in told)
    controls = [[id for id in ids if id in renderer.vocabulary.control_ids] for ids in (plain, evil)]
    assert controls[0] == controls[1]
    assert "qzxkwa qzxkwaa" in renderer.text(evil)


# -- the published templates --------------------------------------------------------------------------------------------

TEXT = st.text(st.sampled_from("ab \n.é"), max_size=6)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
THOUGHT = TEXT.map(lambda text: f"<think>\n{text}\n</think>\n\n{text}")
TURN = st.builds(
    lambda text, number: {"role": "assistant", "content": text, "tool_calls": [CALL] * number}, TEXT, st.integers(1, 2)
)
TOLD = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXT | THOUGHT
)


@needs_trl
@pytest.mark.parametrize("name", list(PUBLISHED))
@settings(max_examples=200)
@given(data=st.data())
def test_our_words_of_a_template_say_what_the_published_one_says(name, data):
    texts = (TEMPLATES / f"{name}.jinja").read_text(), published(PUBLISHED[name])
    ours, other = (ChatTemplate({"default": text}, {"bos_token": "<b>"}) for text in texts)
    turns: list[dict[str, Any]] = [user("u")]
    for turn in data.draw(st.lists(st.one_of(TURN, TOLD), max_size=4)):
        if name == "llama3_1" and "tool_calls" in turn:  # it takes one
            turn = {**turn, "tool_calls": [CALL]}
        if name == "deepseek_v3_0324" and "tool_calls" in turn:  # it joins them to text
            function = {"name": "f", "arguments": '{"a": "b"}'}
            turn = {**turn, "content": turn["content"] or None, "tool_calls": [{**CALL, "function": function}]}
        turns.append(turn)
        if "tool_calls" in turn:
            turns += [{"role": "tool", "tool_call_id": "c", "content": data.draw(TEXT)}] * data.draw(st.integers(1, 2))
    tools = data.draw(st.sampled_from([None, [schema_of(tool) for tool in TOOLS]]))
    for prompt in (True, False):
        assert ours.render(turns, tools, prompt=prompt) == other.render(turns, tools, prompt=prompt)


@needs_trl
@pytest.mark.parametrize("name", list(VERBATIM))
def test_openings_under_published_templates_are_those_that_transformers_writes(tmp_path, name):
    family, format = VERBATIM[name]
    checkpoint(tmp_path, family, template=published(name))
    if format is None:
        with pytest.raises(UnfitCheckpoint, match="allowed"):
            format_of(tmp_path)
        return
    renderer = detected(tmp_path)
    assert renderer.name == format
    for brief in briefs():
        assert renderer.opening(brief) == theirs(tmp_path, brief)


def test_every_family_has_a_template():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)
