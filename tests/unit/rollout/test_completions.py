"""Replies of a chat endpoint: malformed ones are named, and no text of theirs is more than a tokenizer takes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.byhand.builtin import builtin
from services.rollout.byhand.completions import Completions, _message
from shared.environments import InfrastructureError
from shared.renderers import Reading


def read(message: Any) -> Reading:
    """What a reply says, once its ids are made."""
    said, _ = _message({"choices": [{"message": message}]})
    return Completions("", "", "", builtin(), 1.0)._written(said, 0)[1]


def calling(arguments: Any, name: str = "edit") -> dict[str, Any]:
    return {"tool_calls": [{"id": "1", "function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize("calls", ["x", ["x"], [None], [[]], {"a": 1}])
def test_calls_that_are_no_objects_are_no_chat_completion(calls: Any) -> None:
    with pytest.raises(InfrastructureError, match="tool_calls is no list of objects"):
        read({"tool_calls": calls})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"line": 2', "arguments: no JSON"),
        ("[1]", "arguments are an array"),
        ([1], "arguments are an array"),
        ("[" * 100_000, "arguments: nested too deeply"),
        ('{"a": "\\ud800"}', "arguments: no JSON"),
        ('{"a": "\ud800"}', "bytes that are no UTF-8"),
        ({"a": "\ud800"}, "bytes that are no UTF-8"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": ' + "9" * 5000 + "}", "arguments: no JSON"),
    ],
)
def test_arguments_that_are_no_object_are_an_error_of_the_call(arguments: Any, said: str) -> None:
    (call,) = read(calling(arguments)).calls
    assert (call.name, call.arguments) == ("edit", {})
    assert said in str(call.error)


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_arguments_come_as_text_or_as_an_object(arguments: Any) -> None:
    (call,) = read(calling(arguments)).calls
    assert (call.arguments, call.error) == ({"a": 1}, None)


@pytest.mark.parametrize("arguments", ["", " ", None, {}])
def test_arguments_may_be_left_out(arguments: Any) -> None:
    (call,) = read(calling(arguments)).calls
    assert (call.arguments, call.error) == ({}, None)


def test_half_characters_become_replacement_characters() -> None:
    found = read({"content": "a\ud800b\U0001f600", "reasoning": "\udfff", **calling("{}", "\ud800")})
    assert (found.text, found.thinking, found.calls[0].name) == ("a\ufffdb\U0001f600", "\ufffd", "\ufffd")


SURROGATES = st.text(st.characters(), max_size=4)


@given(
    st.recursive(
        st.none() | st.integers() | SURROGATES,
        lambda one: (
            st.lists(one, max_size=2)
            | st.dictionaries(st.sampled_from(["function", "name", "arguments", "id"]), one, max_size=3)
        ),
        max_leaves=8,
    ),
    SURROGATES,
)
def test_no_call_raises_anything_but_a_named_error(call: Any, text: str) -> None:
    try:
        read({"content": text, "tool_calls": [call, {"function": {"name": text, "arguments": json.dumps(call)}}]})
    except InfrastructureError as error:
        assert "no chat completion" in str(error)  # noqa: PT017


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_that_is_no_utf_8_is_named(status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=b"\xff no JSON", content_type="application/json")

    async def ask() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        async with (
            TestServer(app) as server,
            Completions(str(server.make_url("/v1")), "model", "", builtin(), 1.0) as endpoint,
        ):
            await endpoint._ask({})

    with pytest.raises(InfrastructureError, match="\ufffd no JSON"):
        asyncio.run(ask())
