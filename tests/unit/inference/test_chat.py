"""Conversations: what is asked to token ids, token ids to what is answered."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.inference.chat import template
from services.inference.chat.calls import CLOSE, OPEN, Call, content_of, parse, settled
from services.inference.chat.talk import Talk
from services.inference.sampler import sample
from services.inference.wire import BadRequest, Unavailable
from shared.chat.openai.fields import CALL, FUNCTION, MESSAGE, PART, REQUEST, STREAM, Fields
from shared.chat.openai.request import read, schemas, turns
from shared.chat.reader import Reader
from tests.chat_checkpoint import END, TEMPLATE, VOCABULARY, call, tool, write_chat

USER = {"role": "user", "content": "Größe? 😀"}
PIECES = (
    OPEN,
    CLOSE,
    "\n",
    " ",
    '{"name": "f", "arguments": {}}',
    '{"name": "f"',
    ', "arguments": {"a": "',
    '"}}',
    "é",
    "}",
    "<think>",
    "</think>",
)
SPEECH = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def speaks(tmp_path_factory: pytest.TempPathFactory) -> template.ChatTemplate:
    directory = tmp_path_factory.mktemp("speaks")
    write_chat(directory)
    return template.load(directory)


def asked(**fields: Any) -> Any:
    return read(json.dumps({"messages": [USER], **fields}).encode())


def answered(tokens: list[int], finish: str = "stop", **meta: Any) -> dict[str, Any]:
    """As /generate answers."""
    told = {
        "finish_reason": {"type": finish, "message": "why"},
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": len(tokens)}],
        "output_token_logprobs": [(-0.5, token, None) for token in tokens],
        **meta,
    }
    return {"text": "", "output_ids": tokens, "meta_info": told}


def said(speaks: template.ChatTemplate, text: str) -> list[int]:
    return [*speaks.tokenizer.encode(text, add_special_tokens=False).ids, *speaks.stop_tokens]


# -- tool calls --------------------------------------------------------------------------------------------------------


@given(SPEECH)
@example(OPEN + "[" * 100_000)
@example(f'{OPEN}{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}{CLOSE}')
@example(f'{OPEN}{{"name": "f", "arguments": {{"a": NaN}}}}{CLOSE}')
@example("\ud800" + call("f"))
@example(f'{OPEN}{{"name": "\ud800", "arguments": {{}}}}{CLOSE}')
def test_whatever_is_said_is_parted_into_text_and_calls_and_nothing_is_lost(text):
    parts = parse(text)
    assert "".join(part if isinstance(part, str) else part.source for part in parts) == text
    for part in parts:
        if isinstance(part, Call):
            body = json.loads(part.source.strip().removeprefix(OPEN).removesuffix(CLOSE))
            assert body == {"name": part.name, "arguments": json.loads(part.arguments)}


@given(SPEECH, st.integers(0, 200))
def test_what_is_settled_stays_the_beginning_of_the_content_whatever_follows(text, at):
    first = text[:at]
    assert content_of(parse(text)).startswith(first[: settled(first)])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    max_leaves=5,
)
CALLS = st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), JSON, max_size=3)), max_size=3)


@given(CALLS, st.booleans())
def test_well_formed_calls_are_read_whatever_their_arguments_say(calls, escaped):
    written = [f"{OPEN}\n{json.dumps({'name': n, 'arguments': a}, ensure_ascii=escaped)}\n{CLOSE}" for n, a in calls]
    parts = parse("Look: " + "\n".join(written))
    assert content_of(parts).rstrip() == "Look:"
    found = [(p.name, json.loads(p.arguments)) for p in parts if isinstance(p, Call)]
    assert found == calls


@pytest.mark.parametrize(
    "text",
    [
        OPEN,
        f"{OPEN}{CLOSE}",
        f'{OPEN}{{"name": "f", "arguments": {{}}}}',
        f'{OPEN}{{"name": "f"}}{CLOSE}',
        f'{OPEN}{{"name": "", "arguments": {{}}}}{CLOSE}',
        f'{OPEN}{{"name": 3, "arguments": {{}}}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": "{{}}"}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": []}}{CLOSE}',
        f'{OPEN}{{"name": "f", "arguments": {{}}, "id": 1}}{CLOSE}',
        f'{OPEN}{{"name": "f", "name": "g", "arguments": {{}}}}{CLOSE}',
        f"{OPEN}[]{CLOSE}",
    ],
)
def test_a_malformed_call_stays_content(text):
    assert parse(f"a {text}") == [f"a {text}"]


def test_a_closing_tag_within_an_argument_ends_no_call():
    (found,) = parse(call("write", text=f"say {CLOSE} and {OPEN}"))
    assert isinstance(found, Call)
    assert json.loads(found.arguments) == {"text": f"say {CLOSE} and {OPEN}"}


# -- text --------------------------------------------------------------------------------------------------------------

IDS = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)


@given(IDS, st.lists(st.integers(0, 40), max_size=5))
def test_the_text_is_the_same_in_whatever_portions_the_tokens_come(speaks, ids, cuts):
    whole, portions = (Reader(speaks.tokenizer, speaks.hidden, ["e", "in"]) for _ in range(2))
    whole.feed(ids)
    whole.close()
    for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(ids)], strict=True):
        before = portions.text[: portions.settled]
        portions.feed(ids[a:b])
        assert portions.text.startswith(before)
    portions.close()
    assert (portions.text, portions.tokens, portions.stopped) == (whole.text, whole.tokens, whole.stopped)


@given(st.text())
def test_every_text_comes_back_as_it_was_with_no_half_character_on_the_way(speaks, text):
    reader = Reader(speaks.tokenizer, frozenset(), [])
    for id in speaks.tokenizer.encode(text, add_special_tokens=False).ids:
        reader.feed([id])
        assert text.startswith(reader.text)
    reader.close()
    assert reader.text == text


@given(st.text("abc<", max_size=30), st.lists(st.text("abc<", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_text_ends_before_the_first_stop_sequence(speaks, text, stops):
    reader = Reader(speaks.tokenizer, frozenset(), stops)
    reader.feed(speaks.tokenizer.encode(text, add_special_tokens=False).ids)
    reader.close()
    assert reader.stopped == any(stop in text for stop in stops)
    assert not any(stop in reader.text for stop in stops)
    assert text.startswith(reader.text)
    assert reader.stopped or reader.text == text


# -- messages to ids -----------------------------------------------------------------------------------------------------

TURNS = [
    {"role": "system", "content": "Be brief & <b>."},
    {"role": "user", "content": [{"type": "text", "text": "Read "}, {"type": "text", "text": "it: ü"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "ä<.py"}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "x = 1\n"},
]


@pytest.mark.parametrize("where", ["file", "configuration", "several"])
@pytest.mark.parametrize("tools", [None, [tool("read"), tool("write")]])
def test_the_prompt_is_the_one_that_transformers_writes(tmp_path, where, tools):
    write_chat(tmp_path, TEMPLATE if where == "file" else None)
    if where != "file":
        path = tmp_path / "tokenizer_config.json"
        several = [{"name": "tool_use", "template": "T" + TEMPLATE}, {"name": "default", "template": TEMPLATE}]
        config = json.loads(path.read_text()) | {"chat_template": TEMPLATE if where == "configuration" else several}
        path.write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    request = asked(messages=TURNS, tools=tools, chat_template_kwargs={"enable_thinking": False})
    written = turns(request)
    expected = theirs.apply_chat_template(
        written, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=False
    )
    assert Talk(request, template.load(tmp_path), context=4096).generate.input_ids == expected
    assert schemas(request) == tools


def test_a_call_that_was_answered_and_is_sent_back_is_written_as_the_model_wrote_it(speaks):
    text = "I look.\n" + call("read", path="a.py") + "\n" + call("read", path="b\n.py")
    whole = Talk(asked(tools=[tool("read")]), speaks, context=4096).completion(answered(said(speaks, text)))
    message = whole["choices"][0]["message"]
    back = Talk(asked(messages=[USER, message], tools=[tool("read")]), speaks, context=4096).generate.input_ids
    assert f"<|im_start|>assistant\n{text}{END}" in speaks.tokenizer.decode(back, skip_special_tokens=False)


def test_log_probabilities_are_told_as_they_were_sampled(speaks):
    """Never above 0 and within 1e-4 of float64, at the temperature that was asked for."""
    temperatures = np.array((1e-6, 0.005, 0.3, 1.0, 4.0))
    logits = torch.randn(len(temperatures), 64, generator=torch.Generator().manual_seed(3)) * 30
    tokens, chances = sample(logits, temperatures, np.random.default_rng(2).random(len(logits)))
    pairs = [(chance, token, None) for chance, token in zip(chances.tolist(), tokens.tolist(), strict=True)]
    whole = Talk(asked(logprobs=True), speaks, context=4096).completion(
        answered(tokens.tolist(), "length", output_token_logprobs=pairs)
    )
    told = np.array([one["logprob"] for one in whole["choices"][0]["logprobs"]["content"]])
    scaled = logits.double().numpy() / temperatures[:, None]
    exact = scaled - scaled.max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    assert len(told) == len(tokens)
    assert told.max() <= 0
    np.testing.assert_allclose(told, exact[np.arange(len(tokens)), tokens], atol=1e-4)


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ({"tokenizer_config.json": "{}"}, "no chat template"),
        ({"chat_template.jinja": "x"}, "no tokenizer.json"),
        ({"chat_template.jinja": "{% if %}", "tokenizer.json": None}, "cannot be read"),
        ({"chat_template.jinja": "x", "tokenizer.json": "{}"}, "cannot be read"),
        ({"chat_template.jinja": "x", "tokenizer_config.json": "["}, "cannot be read"),
    ],
)
def test_a_checkpoint_that_cannot_speak_says_what_it_lacks_and_what_to_do(tmp_path: Path, files, lacks):
    if "tokenizer.json" in files:
        write_chat(tmp_path, None)
    for name, text in files.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(BadRequest, match=lacks) as refused:
        template.load(tmp_path)
    assert str(tmp_path) not in str(refused.value)
    assert "cannot be read" in lacks or "/generate" in str(refused.value)


# -- what is asked -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, ["messages", "none", "1 and more"]),
        ({"messages": 3}, ["messages", "array"]),
        ({"messages": [{"role": "robot"}]}, ["messages[0].role", "'robot'", "'assistant'"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            ["messages[0].content[0].type", "'text'"],
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            ["messages[0].tool_calls[0].function.arguments", "[1]", "JSON object"],
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            ["messages[0].tool_calls[0].function.arguments", "JSON object"],
        ),
        ({"tools": [{"type": "browser", "function": {"name": "f"}}]}, ["tools[0].type", "'browser'", "'function'"]),
        ({"tool_choice": "required"}, ["tool_choice", "'required'", "'none', 'auto'"]),
        ({"tool_choice": {"type": "function"}}, ["tool_choice", "function", "'none', 'auto'"]),
        ({"n": 2}, ["n:", "found 2", "allowed: 1"]),
        ({"top_p": 0.9}, ["top_p", "0.9", "allowed: 1", "importance ratios"]),
        ({"presence_penalty": 1}, ["presence_penalty", "allowed: 0"]),
        ({"logit_bias": {"5": 3}}, ["logit_bias"]),
        ({"temprature": 0.2}, ["temprature", "Did you mean temperature"]),
        ({"maxTokens": 5}, ["maxTokens", "Did you mean max_tokens"]),
        ({"typical_p": 0.5}, ["typical_p", "0.5", "allowed: 1"]),
        ({"ignore_eos": True}, ["ignore_eos", "True", "allowed: False"]),
        ({"guided_json": {"type": "object"}}, ["guided_json", "allowed: None"]),
        ({"top_logprobs": 5}, ["top_logprobs", "5", "allowed: 0"]),
        ({"response_format": {"type": "json_object"}}, ["response_format", "json_object"]),
        ({"temperature": -1}, ["temperature", "-1", "0..100"]),
        ({"max_tokens": 0}, ["max_tokens", "0", "1 and more"]),
        ({"max_completion_tokens": 0}, ["max_completion_tokens", "0"]),
        ({"seed": 1 << 70}, ["seed", "64 bits"]),
        ({"stop": ["a", ""]}, ["stop", "''"]),
        ({"stop": list("abcde")}, ["stop", "5", "at most 4"]),
        ({"stop": ["a", "b" * 1025]}, ["stop", "1025", "at most 1024"]),
        ({"stream": "yes"}, ["stream", "bool"]),
        ({"chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs", "'messages'"]),
        ({"messages": [USER] * 4}, ["messages", "tokens", "1..64"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_field_value_and_what_is_allowed(speaks, fields, words):
    with pytest.raises(BadRequest) as refused:
        Talk(asked(**fields), speaks, context=64)
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 1, "n": 1, "presence_penalty": 0.0, "logit_bias": None, "response_format": {"type": "text"}},
        {"user": "somebody", "metadata": {"a": 1}, "store": False},
        {name: "x" for name in ("service_tier", "prompt_cache_key", "safety_identifier", "prediction", "verbosity")},
        {
            name: "x"
            for name in ("reasoning_effort", "web_search_options", "max_tool_calls", "priority", "rid", "cache_salt")
        },
        {"typical_p": 1.0, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "skip_special_tokens": True},
        {"tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0, "stop": None, "stream": None},
    ],
)
def test_what_changes_nothing_is_taken(speaks, fields):
    assert Talk(asked(**fields), speaks, context=64).sampling == Talk(asked(), speaks, context=64).sampling


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"unheard_of": [1]}, ["unheard_of: found [1]", "allowed: ", "max_tokens"]),
        ({"skip_special_tokens": False}, ["skip_special_tokens: found False; allowed: True"]),
        ({"enable_thinking": False}, ["enable_thinking: found False; allowed: None"]),
        ({"stream_options": {"continuous_usage_stats": True}}, ["stream_options.continuous_usage_stats: found True"]),
        ({"messages": [USER, {"role": "assistant", "refusal": "no"}]}, ["messages[1].refusal: found 'no'"]),
        ({"messages": [USER, {"role": "assistant", "prefix": True}]}, ["messages[1].prefix: found True"]),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, ["messages[0].function_call: found {"]),
        ({"messages": [{"role": "user", "contents": "a"}]}, ["messages[0].contents", "Did you mean content?"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "txt": "a"}]}]},
            ["messages[0].content[1].txt", "Did you mean text?"],
        ),
        (
            {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
            ["messages[0].tool_calls", "'user'", "'assistant'"],
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "argument": "{}"}}]}]},
            ["messages[0].tool_calls[0].function.argument:", "Did you mean arguments?"],
        ),
    ],
)
def test_a_field_that_is_neither_served_nor_ignored_is_refused_by_its_place(fields, words):
    with pytest.raises(BadRequest) as refused:
        asked(**fields)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_what_clients_send_along_is_taken_at_every_level_and_changes_nothing(speaks):
    def more(level: Fields, **fields: Any) -> dict[str, Any]:
        neutral = {name: allowed[-1] for name, allowed in level.neutral.items()}
        return {**fields, **neutral, **dict.fromkeys(level.ignored, "x")}

    function = {"name": "read", "arguments": "{}"}
    plain = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [{"function": function}]},
    ]
    calls = [more(CALL, function=more(FUNCTION, **function))]
    content = [more(PART, type="text", text="a")]
    shown = [more(MESSAGE, **USER), more(MESSAGE, role="assistant", content=content, tool_calls=calls)]
    body = more(REQUEST, messages=shown, stream_options=more(STREAM))
    talk = Talk(read(json.dumps(body).encode()), speaks, context=4096)
    assert talk.generate.input_ids == Talk(asked(messages=plain), speaks, context=4096).generate.input_ids


def test_the_page_names_every_field_that_is_ignored():
    page = (Path(__file__).parents[3] / "docs" / "inference.md").read_text()
    table = page.partition("Taken and not read")[2].partition("The answer is OpenAI's")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert named == frozenset().union(*(level.ignored for level in (REQUEST, STREAM, MESSAGE, PART, CALL, FUNCTION)))


def test_the_fields_of_openai_become_those_of_generate(speaks):
    talk = Talk(
        asked(temperature=0.5, max_tokens=9, max_completion_tokens=5, seed=3, logprobs=True), speaks, context=64
    )
    s = talk.sampling
    assert (s.temperature, s.max_new_tokens, s.sampling_seed, s.stop_token_ids) == (0.5, 5, 3, list(speaks.stop_tokens))
    assert (talk.generate.return_logprob, talk.generate.stream) == (True, False)
    assert Talk(asked(), speaks, context=64).sampling.max_new_tokens == 65 - len(talk.generate.input_ids)


def test_no_tool_is_offered_or_read_where_none_is_to_be_called(speaks):
    tools, text = [tool("read")], call("read", path="a")
    without = Talk(asked(), speaks, context=4096)
    talk = Talk(asked(tools=tools, tool_choice="none"), speaks, context=4096)
    assert talk.generate.input_ids == without.generate.input_ids
    choice = talk.completion(answered(said(speaks, text)))["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": text}, "stop")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda s: (
        st.lists(s, max_size=3)
        | st.dictionaries(st.sampled_from(("role", "content", "type", "function", "name", "x")), s)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ("messages", "tools", "tool_choice", "stop", "n", "top_p", "seed", "logprobs", "stream_options", "model")
)


@settings(max_examples=300)
@given(st.dictionaries(NAMES, ANY), st.binary(max_size=5))
@example({}, b"")
@example({"tools": [{"function": {"name": "f", "parameters": {}}}]}, b"")
def test_whatever_is_sent_is_taken_or_refused_as_the_clients_mistake(speaks, fields, tail):
    with contextlib.suppress(BadRequest):
        Talk(read(json.dumps({"messages": [USER], **fields}).encode() + tail), speaks, context=4096)


def test_a_body_that_is_nested_without_end_is_the_clients_mistake():
    body = b'{"messages": [], "tools": [{"function": {"name": "f", "parameters": ' + b'{"a":' * 100_000
    with pytest.raises(BadRequest, match="deep"):
        read(body)


# -- what is answered ------------------------------------------------------------------------------------------------------


def test_a_completion_tells_text_calls_usage_versions_and_log_probabilities(speaks):
    text = "I look.\n" + call("read", path="ä") + "\n" + call("stop") + "\n"
    ids = said(speaks, text)
    whole = Talk(asked(tools=[tool("read")], logprobs=True, model="m"), speaks, context=4096).completion(answered(ids))
    (choice,) = whole["choices"]
    assert (whole["object"], whole["model"], choice["index"], choice["finish_reason"]) == (
        "chat.completion",
        "m",
        0,
        "tool_calls",
    )
    assert choice["message"]["content"] == "I look."
    calls = choice["message"]["tool_calls"]
    assert [c["function"]["name"] for c in calls] == ["read", "stop"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"path": "ä"}, {}]
    assert len({c["id"] for c in calls}) == 2
    assert whole["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": len(ids),
        "total_tokens": 7 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert (whole["weight_version"], [s["version"] for s in whole["weight_versions"]]) == ("2", ["1", "2"])
    told = choice["logprobs"]["content"]
    octets = [t["bytes"] if t["bytes"] is not None else [] for t in told]
    assert b"".join(map(bytes, octets)).replace(END.encode(), b"").startswith(b"I look.")
    assert {t["logprob"] for t in told} == {-0.5}


@pytest.mark.parametrize(("finish", "reason"), [("stop", "tool_calls"), ("length", "length")])
def test_calls_of_an_answer_that_was_cut_short_are_not_its_end(speaks, finish, reason):
    ids = said(speaks, call("read", path="a"))
    choice = Talk(asked(tools=[tool("read")]), speaks, context=4096).completion(answered(ids, finish))["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == (reason, None)


def test_an_aborted_generation_is_no_completion(speaks):
    with pytest.raises(Unavailable, match="why"):
        Talk(asked(), speaks, context=64).completion(answered([1, 2], "abort"))


def test_a_stop_sequence_ends_text_usage_versions_and_log_probabilities(speaks):
    talk = Talk(asked(stop="look", logprobs=True), speaks, context=64)
    assert talk.generate.stream  # so that it is found while it is sampled
    ids = said(speaks, "I look at it.")
    assert talk.hear(ids)
    whole = talk.completion(answered(ids, "abort"))
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I ", "stop")
    n = whole["usage"]["completion_tokens"]
    assert n < len(ids)
    assert len(choice["logprobs"]["content"]) == whole["weight_versions"][-1]["end"] == n


@given(SPEECH, st.lists(st.integers(0, 60), max_size=6), st.booleans(), st.sampled_from([None, ["é", "f"]]))
def test_the_chunks_of_a_stream_together_are_the_completion(speaks, text, cuts, offered, stop):
    text = text.encode(errors="replace").decode()
    fields = {"tools": [tool("f")] if offered else None, "stop": stop, "logprobs": True}
    ids = said(speaks, text)
    whole = Talk(asked(**fields), speaks, context=4096).completion(answered(ids))
    talk = Talk(asked(**fields, stream=True, stream_options={"include_usage": True}), speaks, context=4096)
    chunks = [talk.first_chunk()]
    for cut in sorted(cuts):
        talk.hear(ids[:cut])
        chunks += talk.chunks()
    chunks += talk.last_chunks(answered(ids))
    *chunks, usage = chunks
    message = whole["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    end = chunks[-1]["choices"][0]
    assert (end["finish_reason"], end["logprobs"]) == (
        whole["choices"][0]["finish_reason"],
        whole["choices"][0]["logprobs"],
    )
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert chunks[-1]["weight_version"] == whole["weight_version"]
    assert len({chunk["id"] for chunk in chunks}) == 1
