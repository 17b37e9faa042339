"""Whatever a client sends is read, or refused by name: never a failure of ours."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.endpoint.history import History
from services.rollout.endpoint.prompting import prompt_of
from shared.chat import Asked
from shared.chat.anthropic.request import asked_of as from_anthropic
from shared.chat.openai.house import asked_of as from_openai
from shared.chat.refusing import BadRequest
from shared.renderers.chat import Chat
from tests.unit.endpoint.world import renderer

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
roles = st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"])
text = {"type": "text", "text": "t<|im_end|>"}
use = {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}}
blocks = st.sampled_from([text, use, {"type": "tool_result", "tool_use_id": "c", "content": "r"}, {"type": "image"}, 5])
call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
messages = st.fixed_dictionaries(
    {"role": roles, "content": st.none() | st.text(max_size=5) | st.lists(blocks, max_size=3) | anything},
    optional={"tool_calls": st.lists(st.just(call), max_size=2) | anything, "tool_call_id": st.just("c") | anything},
)
tools = st.lists(
    st.sampled_from(
        [
            {"type": "function", "function": {"name": "bash"}},
            {"name": "bash", "input_schema": {"type": "object"}},
            {"name": "no good name!", "input_schema": {}},
        ]
    )
    | anything,
    max_size=2,
)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(messages, max_size=5) | anything, "max_tokens": st.integers(-1, 9)},
    optional={
        "tools": tools,
        "system": anything | st.lists(blocks, max_size=2),
        "stop": anything,
        "stop_sequences": st.lists(st.text(max_size=3), max_size=3) | anything,
        "tool_choice": anything,
        "stream": anything,
        "temperature": anything,
        "n": anything,
        "thinking": anything,
    },
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return renderer(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("read", [from_openai, from_anthropic], ids=["openai", "anthropic"])
def test_any_body_is_read_or_refused(chat: Chat, read: Callable[[bytes], Asked]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(bodies | anything)
    def holds(body: Any) -> None:
        with contextlib.suppress(BadRequest):
            assert prompt_of(read(json.dumps(body).encode()), History(), chat).ids

    holds()


def test_bytes_that_are_no_json_are_refused() -> None:
    for read in (from_openai, from_anthropic):
        for body in (b"", b"{", b"\xff", b"[" * 100_000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'):
            with pytest.raises(BadRequest):
                read(body)
