"""schemathesis against the recording endpoint of an attempt: whatever a client sends, no answer is a 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import requests

from tests import fuzz
from tests.patience import patient
from tests.unit.endpoint.world import recording, renderer, served

schemathesis = fuzz.library()
pytestmark = pytest.mark.slow
ANSWER_S = 20.0
Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "maxLength": 40}
NAME: Schema = {"enum": ["read", "list", "a-tool_2", ""]}
FLAG: Schema = {"type": "boolean"}


def closed(required: Sequence[str] = (), **properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


def several(items: Schema, least: int = 0, most: int = 4) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def one_of(*found: Schema) -> Schema:
    return {"anyOf": list(found)}


def const(value: Any) -> Schema:
    return {"const": value}


PARAMETERS = closed(type=const("object"), properties=closed(path=const({"type": "string"})))
COMMON = {"model": TEXT, "stream": FLAG, "return_token_ids": FLAG, "temperature": const(1.0)}


def openai() -> Schema:
    called = closed(("name", "arguments"), name=NAME, arguments=one_of(const("{}"), const('{"path": "a"}'), TEXT))
    call = closed(("id", "type", "function"), id=TEXT, type=const("function"), function=called)
    said = one_of(TEXT, several(closed(("type", "text"), type=const("text"), text=TEXT)))
    message = one_of(
        closed(("role", "content"), role={"enum": ["user", "system", "developer"]}, content=said),
        closed(("role",), role=const("assistant"), content=one_of(said, const(None)), tool_calls=several(call, 1, 2)),
        closed(("role", "content", "tool_call_id"), role=const("tool"), content=said, tool_call_id=TEXT),
    )
    function = closed(("name",), name=NAME, description=TEXT, parameters=PARAMETERS)
    return closed(
        ("messages",),
        messages=several(message, 1),
        max_tokens={"type": "integer", "minimum": 1, "maximum": 64},
        stop=one_of(TEXT, several(TEXT)),
        tools=several(closed(("type", "function"), type=const("function"), function=function)),
        tool_choice={"enum": ["auto", "none", "required"]},
        logprobs=FLAG,
        **COMMON,
    )


def anthropic(*required: str) -> Schema:
    block = one_of(
        closed(("type", "text"), type=const("text"), text=TEXT),
        closed(("type", "id", "name", "input"), type=const("tool_use"), id=TEXT, name=NAME, input={"type": "object"}),
        closed(("type", "tool_use_id"), type=const("tool_result"), tool_use_id=TEXT, content=TEXT, is_error=FLAG),
        closed(("type", "thinking"), type=const("thinking"), thinking=TEXT, signature=TEXT),
    )
    content = one_of(TEXT, several(block, 1))
    return closed(
        ("messages", *required),
        messages=several(closed(("role", "content"), role={"enum": ["user", "assistant"]}, content=content), 1),
        max_tokens={"type": "integer", "minimum": 1, "maximum": 64},
        system=TEXT,
        stop_sequences=several(TEXT),
        tools=several(closed(("name", "input_schema"), name=NAME, description=TEXT, input_schema=PARAMETERS)),
        tool_choice=closed(("type",), type={"enum": ["auto", "any", "none"]}),
        **COMMON,
    )


BODIES = {
    "/v1/chat/completions": openai(),
    "/v1/messages": anthropic("max_tokens"),
    "/v1/messages/count_tokens": anthropic(),
}


def document() -> dict[str, Any]:
    def operation(schema: Schema) -> dict[str, Any]:
        said = {"required": True, "content": {"application/json": {"schema": schema}}}
        return {"post": {"requestBody": said, "responses": {"200": {"description": "answered"}}}}

    return {
        "openapi": "3.1.0",
        "info": {"title": "endpoint", "version": "1"},
        "paths": {path: operation(schema) for path, schema in BODIES.items()},
    }


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """An attempt that never ends, in a thread of its own: its address and its key."""
    chat = renderer(tmp_path_factory.mktemp("chat"))
    replies = ["Hello.", ("I look.", [("read", {"path": "a.py"})])]
    mine, _ = recording(chat, replies, turns=1 << 30, tokens=1 << 60)
    there: list[str] = []
    begun, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with served(mine) as url:
            there.append(url)
            begun.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert begun.wait(patient(60))
    yield there[0], mine.key
    loop.call_soon_threadsafe(over.set)
    thread.join(patient(60))


@pytest.mark.parametrize("path", list(BODIES))
def test_nothing_that_a_client_sends_breaks_the_endpoint(endpoint: tuple[str, str], path: str) -> None:
    url, key = endpoint
    seen: Counter[int] = Counter()

    def ask(case: schemathesis.Case) -> None:
        answer = case.call(base_url=url, headers={"x-api-key": key}, timeout=patient(ANSWER_S))
        seen[answer.status_code] += 1
        assert answer.status_code < 500, answer.content
        if answer.headers.get("Content-Type", [""])[0].startswith("application/json"):
            assert msgspec.json.decode(answer.content)

    fuzz.explore(document(), path, "post", ask)
    print(path, dict(seen))
    assert seen[200], seen  # it looks behind the checks of the fields
    asked = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    answer = requests.post(f"{url}{path}", json=asked, headers={"x-api-key": key}, timeout=patient(ANSWER_S))
    assert answer.status_code == 200, answer.text
