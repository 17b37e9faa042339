"""What /v1/chat/completions is asked, in OpenAI's words: read, and refused where it cannot be served as asked. Pure.

`structs` has the fields that are served, `fields` what becomes of all others. Errors name the field, what was found and what is
allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shared.chat.openai.fields import REQUEST
from shared.chat.openai.structs import (
    CHOICES,
    LONGEST_STOP,
    ROLES,
    ChatMessage,
    ChatRequest,
    ContentPart,
    ToolCall,
)
from shared.chat.refusing import NESTED, BadRequest

MAX_STOPS = 4  # OpenAI's limit; each is searched for after every token
THOUGHT = "reasoning_content"  # what most templates call an earlier turn's thinking
_NAMED = 4  # ids of calls that a refusal names
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


class Arguments(dict[str, Any]):
    """The arguments of a call. `written`: as the client sent them; some templates take the text."""

    def __init__(self, value: dict[str, Any], written: str) -> None:
        super().__init__(value)
        self.written = written


_DECODER = msgspec.json.Decoder(ChatRequest)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MESSAGES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def read(body: bytes) -> ChatRequest:
    """Raises BadRequest."""
    try:
        asked = _DECODER.decode(body or b"{}")
        _check(asked)
        REQUEST.require(body)
        fields = _FIELDS.decode(body)
        asked.__dict__["tools"] = msgspec.json.decode(fields.get("tools", b"null"))
        asked.__dict__["calls"] = [
            msgspec.json.decode(message.get("tool_calls", b"null")) for message in _MESSAGES.decode(fields["messages"])
        ]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body: {error}") from None
    except RecursionError:
        raise BadRequest(NESTED) from None
    return asked


def turns(asked: ChatRequest) -> list[dict[str, Any]]:
    """The messages as chat templates read them: content is text, arguments are objects, calls have their fields in the order in
    which they were sent. Raises BadRequest."""
    sent = zip(asked.messages, asked.__dict__["calls"], strict=True)
    return [_turn(f"messages[{i}]", message, calls or []) for i, (message, calls) in enumerate(sent)]


def require_calls(asked: ChatRequest) -> None:
    """Raise BadRequest for the result of a call that no earlier message made. Calls without ids are let pass."""
    made: set[str] = set()
    unnamed = False
    for i, message in enumerate(asked.messages):
        for call in message.tool_calls or ():
            unnamed = unnamed or not call.id
            made.add(call.id or "")
        answered = message.tool_call_id if message.role == "tool" else None
        if answered is not None and answered not in made and not unnamed:
            allowed = ", ".join(map(repr, sorted(made)[-_NAMED:])) or "none, since no earlier message has tool_calls"
            raise BadRequest(
                f"messages[{i}].tool_call_id: found {answered!r:.60}; allowed: the id of a call in an earlier message ({allowed})"
            )


def schemas(asked: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as chat templates read them: each as it was sent, with fields that are not read here, in its order."""
    return asked.__dict__["tools"] or None if asked.offered else None


def names(asked: ChatRequest) -> dict[str, Any]:
    """What the template is told besides messages and tools."""
    effort = {} if asked.reasoning_effort is None else {"reasoning_effort": asked.reasoning_effort}
    return {**effort, **(asked.chat_template_kwargs or {})}


def _check(asked: ChatRequest) -> None:
    if not asked.messages:
        raise BadRequest("messages: found none; allowed: 1 and more")
    t = asked.temperature
    if t is not None and not (math.isfinite(t) and 0 <= t <= 100):
        raise BadRequest(f"temperature: found {t!r}; allowed: 0..100")
    for name in ("max_completion_tokens", "max_tokens"):
        n = getattr(asked, name)
        if n is not None and n < 1:
            raise BadRequest(f"{name}: found {n}; allowed: 1 and more")
    if asked.seed is not None and not -(1 << 63) <= asked.seed < 1 << 63:
        raise BadRequest(f"seed: found {asked.seed}; allowed: 64 bits with a sign")
    if len(asked.stops) > MAX_STOPS:
        raise BadRequest(f"stop: found {len(asked.stops)} sequences; allowed: at most {MAX_STOPS}")
    if "" in asked.stops:
        raise BadRequest("stop: found ''; allowed: sequences of one character and more")
    if (longest := max(map(len, asked.stops), default=0)) > LONGEST_STOP:
        raise BadRequest(f"stop: found a sequence of {longest} characters; allowed: at most {LONGEST_STOP}")
    if asked.tool_choice is not None and asked.tool_choice not in CHOICES:
        raise BadRequest(
            f"tool_choice: found {asked.tool_choice!r}; allowed: 'none', 'auto'. No call can be forced: sampling is not "
            "constrained"
        )
    for i, message in enumerate(asked.messages):
        _check_message(f"messages[{i}]", message)
    for i, tool in enumerate(asked.tools or []):
        if tool.type != "function":
            raise BadRequest(f"tools[{i}].type: found {tool.type!r}; allowed: 'function'")
    for name in _RESERVED:
        if name in (asked.chat_template_kwargs or {}):
            raise BadRequest(f"chat_template_kwargs: found {name!r}; allowed: names besides {', '.join(_RESERVED)}")


def _turn(where: str, message: ChatMessage, sent: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    # OpenAI's newer name: templates do not know it, and some leave out in silence what they do not know.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(message.content)}
    if message.tool_calls:
        calls = enumerate(zip(message.tool_calls, sent, strict=True))
        turn["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call, own) for i, (call, own) in calls]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    thought = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if thought is not None:
        turn[THOUGHT] = thought
    return turn


def _check_message(where: str, message: ChatMessage) -> None:
    if message.role not in ROLES:
        raise BadRequest(f"{where}.role: found {message.role!r}; allowed: {', '.join(map(repr, ROLES))}")
    for i, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type != "text":
            raise BadRequest(f"{where}.content[{i}].type: found {part.type!r}; allowed: 'text'")
    if message.tool_calls and message.role != "assistant":
        found = f"{len(message.tool_calls)} in a message of {message.role!r}"
        raise BadRequest(f"{where}.tool_calls: found {found}; allowed: in those of 'assistant'")
    for i, call in enumerate(message.tool_calls or ()):
        if call.type != "function":
            raise BadRequest(f"{where}.tool_calls[{i}].type: found {call.type!r}; allowed: 'function'")


def _text(content: str | list[ContentPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _call(where: str, call: ToolCall, sent: Mapping[str, Any]) -> dict[str, Any]:
    found = call.function.arguments or "{}"  # clients send "" or null for a call without arguments
    written = json.dumps(found, ensure_ascii=False) if isinstance(found, dict) else found.strip() or "{}"
    try:
        arguments = msgspec.json.decode(written)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{where}.function.arguments: {error}; allowed: a JSON object in a string") from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.function.arguments: found {written[:40]!r}; allowed: a JSON object in a string")
    function = {**sent["function"], "arguments": Arguments(arguments, written)}
    whole = {"type": "function", **sent} if "type" not in sent else sent
    return {**{name: of for name, of in whole.items() if of is not None}, "function": function}
