"""From a chat request to the house's own types, for a service that records what it samples. Pure.

More is refused than a service that only serves must refuse: a field that changes the prompt or the distribution in a way that
neither the renderer nor the trajectory knows.
"""

from __future__ import annotations

from typing import Any

from shared.chat import Asked, Called, Turn
from shared.chat.openai.request import THOUGHT, read, schemas, turns
from shared.chat.openai.structs import ChatRequest
from shared.chat.refusing import BadRequest
from shared.environments import ToolSpec

_RECORDED = "allowed: none here, since the attempt is recorded: the checkpoint's card (etude.json) sets it"


def asked_of(body: bytes) -> Asked:
    """Return what a request asks. Raises BadRequest, which names the field."""
    asked = read(body)
    for name in ("reasoning_effort", "chat_template_kwargs"):
        if found := getattr(asked, name):
            raise BadRequest(f"{name}: found {found!r:.80}; {_RECORDED}")
    if asked.seed is not None:
        raise BadRequest(f"seed: found {asked.seed}; allowed: none here, since each attempt has a seed of its own")
    return Asked(
        turns=tuple(_turn(i, turn) for i, turn in enumerate(turns(asked))),
        tools=_tools(asked),
        model=asked.model or "etude",
        most=asked.limit,
        stops=tuple(asked.stops),
        temperature=asked.temperature,
        stream=bool(asked.stream),
        ids=bool(asked.return_token_ids),
        logprobs=bool(asked.logprobs),
        usage=asked.stream_options is not None and asked.stream_options.include_usage,
    )


def _turn(i: int, turn: dict[str, Any]) -> Turn:
    if turn["role"] == "tool" and "tool_call_id" not in turn:
        raise BadRequest(
            f"messages[{i}].tool_call_id: is missing; allowed: the id of the call that the message answers"
        )
    return Turn(
        role=turn["role"],
        text=turn["content"],
        thinking=turn.get(THOUGHT, "") if turn["role"] == "assistant" else "",
        calls=tuple(_called(call) for call in turn.get("tool_calls", ())),
        answers=turn.get("tool_call_id", "") if turn["role"] == "tool" else "",
    )


def _called(call: dict[str, Any]) -> Called:
    function = call["function"]
    return Called(call.get("id") or "", function["name"], dict(function["arguments"]), function["arguments"].written)


def _tools(asked: ChatRequest) -> tuple[ToolSpec, ...]:
    return tuple(
        ToolSpec(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters or {},
            "runs",
            sent={"type": "function", **sent} if "type" not in sent else sent,
        )
        for tool, sent in zip(asked.offered, schemas(asked) or (), strict=True)
    )
