"""Calls, read from what a model sampled: sound ones whatever they say, broken ones with a reason, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.renderers.calls import CALLS, MAX_CALLS, UnknownCalls, load_calls

READERS = {name: load_calls(name) for name in CALLS}
SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "on": {"type": "boolean"}, "of": {"type": "array"}},
    }
}
MARKS = sorted({mark for reader in READERS.values() for mark in (*reader.marks, *reader.opens)})
PIECES = st.one_of(
    st.sampled_from(MARKS), st.text(max_size=4), st.sampled_from([reader.form for reader in READERS.values()])
)
WORDS = """
<think> </think> {"name":"f","arguments":{}} {"name":"f","parameters":{}} functions.f:0 [ ] { } , <function=f> <parameter=a>
</parameter> </function> to=functions.f analysis ```json f
"""
BITS = st.sampled_from([*WORDS.split(), "\n", " "])
TEXT = st.lists(st.one_of(PIECES, BITS), max_size=10).map("".join)

SOUND = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
    "hermes-list": '<tool_call>[\n{"name": "f", "arguments": %s}\n]</tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>%s<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-fenced": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>",
    "llama": '{"name": "f", "parameters": %s}',
}
WHOLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=8)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | WHOLE | st.sampled_from(MARKS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.text("abc", min_size=1, max_size=3), VALUE, max_size=3)


def calls(name: str, text: str, thinking: bool = False):
    return [part for part in READERS[name].parts(text, thinking, SCHEMAS) if part.kind == "call"]


@pytest.mark.parametrize("name", list(READERS))
@settings(max_examples=50)
@given(text=TEXT, thinking=st.booleans())
def test_the_parts_of_any_text_cover_it_in_order(name, text, thinking):
    parts = READERS[name].parts(text, thinking, SCHEMAS)
    assert "".join(text[part.start : part.end] for part in parts) == text
    for part in parts:
        if part.kind == "call":
            assert part.end > part.start
            assert part.error is None or "valid call" in part.error
            assert part.error is not None or (part.name and json.loads(part.written) == part.arguments)


@pytest.mark.parametrize("name", list(SOUND))
@settings(max_examples=50)
@given(arguments=ARGUMENTS)
def test_a_sound_call_is_read_whatever_its_arguments_say(name, arguments):
    written = json.dumps(arguments, ensure_ascii=False)
    if name in ("harmony", "deepseek-fenced") and any(mark in written for mark in READERS[name].marks):
        return  # nothing tells these forms' own marks within a text from those that end it
    (call,) = calls(name, SOUND[name] % written)
    assert (call.name, call.arguments, call.error) == ("f", arguments, None)


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("llama", "harmony")])
def test_a_call_in_thinking_is_thinking(name):
    form = READERS[name].form
    assert calls(name, f"<think>perhaps {form}</think>done") == []
    assert calls(name, f"perhaps {form}</think>done", thinking=True) == []
    assert calls(name, f"<think>perhaps {form}") == []


def test_harmonys_analysis_is_thinking_and_its_final_channel_is_text():
    text = '<|channel|>analysis<|message|>to=functions.f {"a": 1}<|end|>'
    text += "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    said = {part.kind: text[part.start : part.end] for part in READERS["harmony"].parts(text) if part.kind != "mark"}
    assert said == {"thinking": 'to=functions.f {"a": 1}', "text": "Done."}


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {</tool_call>', ["no JSON", "<tool_call>"]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ["keys name", "allowed: name, arguments"]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
            ["arguments: found a string", "an object"],
        ),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', ["name: found a number"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', ["twice"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', ["NaN"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', ["the end", "</tool_call>"]),
        ("hermes", "<tool_call>" + "[" * 100_000, ["nested"]),
        ("hermes-list", '<tool_call>[{"name": "f", "arguments": {}}', ["no end"]),
        (
            "qwen-xml",
            "<tool_call>\n<function=f>\n<parameter=n>\n1\n</function>\n</tool_call>",
            ["parameter n", "</parameter>"],
        ),
        ("qwen-xml", '<tool_call>{"name": "f"}</tool_call>', ["<function=TOOL>"]),
        ("kimi", SOUND["kimi"].replace("functions.f:3", "f") % "{}", ["'f'", "functions.TOOL:NUMBER"]),
        ("kimi", SOUND["kimi"] % "[]", ["an array", "a JSON object"]),
        ("deepseek", SOUND["deepseek"].replace("<｜tool▁sep｜>", "") % "{}", ["<｜tool▁sep｜>"]),
        ("deepseek-fenced", SOUND["deepseek-fenced"].replace("```", "") % "{}", ["fenced block"]),
        ("glm", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</tool_call>", ["argument n", "</arg_value>"]),
        ("harmony", SOUND["harmony"] % "{", ["no JSON"]),
        ("harmony", SOUND["harmony"].replace("functions.f", "browser.f") % "{}", ["browser.f", "functions.TOOL"]),
        ("llama", '{"name": "f", "parameters": 3}', ["parameters: found a number"]),
        ("llama", "<|python_tag|>print(1)", ["no JSON"]),
    ],
)
def test_a_broken_call_says_what_is_wrong_and_shows_a_valid_one(name, text, words):
    (call,) = calls(name, text)
    assert call.error is not None
    assert all(word in call.error for word in [*words, READERS[name].form]), call.error
    assert text[call.end :] in ("", *READERS[name].marks)  # a section's own end is no part of a call


@pytest.mark.parametrize("name", ["hermes", "kimi", "deepseek", "deepseek-fenced", "qwen-xml"])
def test_a_broken_call_between_sound_ones_leaves_them_as_they_are(name):
    sound = SOUND.get(name, "<tool_call>\n<function=f>\n</function>\n</tool_call>").replace("%s", "{}")
    found = calls(
        name, f"a {sound}\n{sound.replace('f', '', 1) if name == 'hermes' else sound.replace('f', '!', 1)}\n{sound} b"
    )
    assert [call.error is None for call in (found[0], found[-1])] == [True, True]
    assert len(found) == 3


def test_values_of_xml_take_the_type_that_the_tool_names():
    text = "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in [("n", "3"), ("on", "True"), ("of", "[1]"), ("s", "3")]
    )
    (call,) = calls("qwen-xml", text + "</function>\n</tool_call>")
    assert call.arguments == {"n": 3, "on": True, "of": [1], "s": "3"}


def test_a_value_of_xml_may_hold_the_tag_that_ends_it():
    text = "<tool_call>\n<function=f>\n<parameter=s>\na </parameter> b\n</parameter>\n</function>\n</tool_call>"
    (call,) = calls("qwen-xml", text)
    assert call.arguments == {"s": "a </parameter> b"}


def test_an_empty_list_of_calls_calls_nothing():
    assert calls("hermes-list", "<tool_call>[]</tool_call>") == []


def test_several_calls_of_one_list_have_ranges_of_their_own():
    text = '<tool_call>[\n{"name": "f", "arguments": {}},\n{"name": "g", "arguments": {"a": 1}}\n]</tool_call>'
    first, second = calls("hermes-list", text)
    assert (first.name, second.name, first.start, second.end) == ("f", "g", 0, len(text))
    assert first.end <= second.start


def test_kimis_calls_keep_the_names_that_the_model_gave_them():
    assert [call.id for call in calls("kimi", SOUND["kimi"] % "{}")] == ["functions.f:3"]


def test_an_unknown_form_of_calls_is_refused_with_the_known_ones():
    with pytest.raises(UnknownCalls, match=r"found 'pythonic'; allowed: hermes, .*llama"):
        load_calls("pythonic")


class Counted(str):
    """A text that counts the characters that are searched."""

    searched = 0

    def find(self, what: str, start: int = 0) -> int:  # type: ignore[override]
        found = super().find(what, start)
        self.searched += (found if found >= 0 else len(self)) - start
        return found


@pytest.mark.parametrize("name", list(READERS))
@pytest.mark.parametrize("piece", ["TAG", "TAG</tool_call>", "<think></think>", "CALL"])
def test_a_text_of_many_tags_is_read_in_time_linear_in_its_length(name, piece):
    reader = READERS[name]
    piece = piece.replace("TAG", reader.opens[0]).replace("CALL", SOUND.get(name, reader.form).replace("%s", "{}"))
    text = Counted(piece * 3000)
    parts = reader.parts(text, False, SCHEMAS)
    assert "".join(text[part.start : part.end] for part in parts) == text
    assert text.searched < 500 * len(text)


@pytest.mark.parametrize("name", [name for name in READERS if name not in ("llama", "harmony")])
def test_so_many_calls_are_read_and_the_rest_is_one_broken_call(name):
    sound = SOUND.get(name, "<tool_call>f\n</tool_call>").replace("%s", "{}")
    *first, last = calls(name, sound * (MAX_CALLS + 100))
    assert len(first) == MAX_CALLS
    assert "more than 64 calls" in last.error
    assert len(calls(name, sound * MAX_CALLS)) == MAX_CALLS
