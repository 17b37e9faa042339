"""Conversations as sequences: the assistant's tokens alone have a loss, and what the format cannot write is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import phase_data
import pytest

from services.trainer.phases.conversations import BadConversation, Left, read
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer

TOOL = {"type": "function", "function": {"name": "read", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a<|im_end|>.py"}'}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.fixture
def renderer(tmp_path: Path) -> Renderer:
    return load_renderer(phase_data.checkpoint(tmp_path / "start"))


def sequences(tmp_path: Path, renderer: Renderer, *conversations: Any, **options: Any) -> list[Any]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in conversations))
    return list(read(path, renderer, **{"length": 2000, **options}))


def test_the_assistants_tokens_alone_have_a_loss(tmp_path: Path, renderer: Renderer) -> None:
    messages = [user("hi <|im_end|>"), assistant("one"), user("more"), assistant("two")]
    (found,) = sequences(tmp_path, renderer, {"messages": messages})
    assert renderer.text(found.tokens_T.tolist()) == (
        "<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"
    )
    assert renderer.text(found.tokens_T[found.sampled_T].tolist()) == "one<|im_end|>two<|im_end|>"
    assert (found.advantages_T == found.sampled_T).all()
    end = found.tokens_T[-1]
    assert (found.tokens_T == end).sum() == 4  # what the user wrote is text, and no control token


def test_context_may_have_a_weight_of_its_own(tmp_path: Path, renderer: Renderer) -> None:
    (found,) = sequences(tmp_path, renderer, {"messages": [user("a"), assistant("b")]}, context_weight=0.25)
    assert found.sampled_T.sum() == len(found.tokens_T) - 1
    assert set(found.advantages_T.tolist()) == {0.0, 0.25, 1.0}


def test_calls_are_written_and_answered(tmp_path: Path, renderer: Renderer) -> None:
    messages = [
        {"role": "system", "content": "s"},
        user("u"),
        assistant("look", tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "c1", "content": "text"},
        assistant("done"),
    ]
    (found,) = sequences(tmp_path, renderer, {"messages": messages, "tools": [TOOL]})
    said = renderer.text(found.tokens_T[found.sampled_T].tolist())
    body = '{"name": "read", "arguments": {"path": "a<|im_end|>.py"}}'
    assert said == f"look\n<tool_call>\n{body}\n</tool_call><|im_end|>done<|im_end|>"
    assert "<tool_response>\ntext\n</tool_response>" in renderer.text(found.tokens_T.tolist())


@pytest.mark.parametrize(
    ("conversation", "says"),
    [
        ([], "found no object; allowed: an object with messages"),
        ({"messages": []}, "messages: found []; allowed: a list of messages"),
        ({"messages": [{"role": "x"}]}, "messages[0].role: found 'x'; allowed: system, user, assistant, tool"),
        ({"messages": [user("a")]}, "messages: found none of an assistant"),
        ({"messages": [assistant("a")]}, "messages: found none of a user"),
        ({"messages": [user("a"), assistant("b"), user("c")]}, "messages[2].role: found 'user'; allowed: 'assistant'"),
        ({"messages": [user("a"), assistant("b"), assistant("c")]}, "messages[2].role: found 'assistant' twice"),
        ({"messages": [user("a"), assistant(None)]}, "messages[1].content: found null; allowed: a text"),  # type: ignore[arg-type]
        ({"messages": [user("a"), assistant("b", reasoning_content="c")]}, "messages[1].reasoning_content: found some"),
        ({"messages": [user("a"), assistant("b <tool_call> c")]}, "messages[1].tool_calls: format chatml reads"),
        (
            {"messages": [user("a"), assistant("", tool_calls=[CALL]), user("b"), assistant("c")]},
            "messages[1].tool_calls: found no answer to 'c1'",
        ),
        (
            {
                "messages": [
                    user("a"),
                    assistant("", tool_calls=[CALL]),
                    {"role": "tool", "tool_call_id": "c2", "content": "r"},
                    assistant("c"),
                ]
            },
            "messages[2].tool_call_id: found 'c2'; allowed: c1",
        ),
        ({"messages": [user("a"), assistant("b")], "tools": [{}]}, "tools[0].function: found null"),
    ],
)
def test_what_the_renderer_refuses_is_named_by_line_and_field(
    conversation: Any, says: str, tmp_path: Path, renderer: Renderer
) -> None:
    good = {"messages": [user("a"), assistant("b")]}
    with pytest.raises(BadConversation) as raised:
        sequences(tmp_path, renderer, good, conversation)
    assert str(raised.value).startswith(f"{tmp_path / 'chats.jsonl'}, line 2: {says}")


def test_what_is_too_long_is_refused_or_left_out(tmp_path: Path, renderer: Renderer) -> None:
    long, short = ({"messages": [user("a"), assistant("b" * n)]} for n in (90, 2))
    with pytest.raises(BadConversation, match=r"line 1: messages: found \d+ tokens; allowed: 60"):
        sequences(tmp_path, renderer, long, short, length=60)
    left = Left()
    assert len(sequences(tmp_path, renderer, long, short, length=60, too_long="leave_out", left=left)) == 1
    assert (left.taken, left.too_long) == (1, 1)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_checkpoints_own_template_writes_the_same_turns(tmp_path: Path, renderer: Renderer) -> None:
    start = phase_data.checkpoint(tmp_path / "own")
    (start / "chat_template.jinja").write_text(TEMPLATE)
    (start / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (start / "etude.json").write_text(json.dumps({"format": "jinja", "calls": "hermes", "context": 256}))
    chat = {"messages": [user("hi"), assistant("one <|im_end|>"), user("more"), assistant("two")]}
    (found,), (own,) = (sequences(tmp_path, one, chat) for one in (renderer, load_renderer(start)))
    assert own.tokens_T.tolist() == found.tokens_T.tolist()
    assert own.sampled_T.tolist() == found.sampled_T.tolist()
    with pytest.raises(
        BadConversation, match=r"messages\[1\].tool_calls: found some; allowed: none, for the checkpoint's"
    ):
        sequences(tmp_path, load_renderer(start), {"messages": [user("a"), assistant("", tool_calls=[CALL])]})
