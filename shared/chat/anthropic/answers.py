"""Answers and errors in the form of Anthropic's messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from shared.chat import Answered

_REASONS = {"stop": "end_turn", "stop_sequence": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message(answer: Answered) -> dict[str, Any]:
    return {
        **_head(answer),
        "content": _blocks(answer),
        "stop_reason": _REASONS[answer.finish],
        "stop_sequence": answer.stop,
        "usage": _usage(answer),
        **({"prompt_token_ids": list(answer.prompt), "token_ids": list(answer.tokens)} if answer.ids else {}),
    }


def events(answer: Answered) -> Iterator[bytes]:
    """Yield the answer as server-sent events."""
    begun = {**_usage(answer), "output_tokens": 0}
    head = {**_head(answer), "content": [], "stop_reason": None, "stop_sequence": None, "usage": begun}
    if answer.ids:
        head["prompt_token_ids"] = list(answer.prompt)
    yield _event("message_start", message=head)
    empty: dict[str, Any]
    blocks = _blocks(answer)
    for i, block in enumerate(blocks):
        match block["type"]:
            case "thinking":
                empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
            case "tool_use":
                written = answer.calls[i - len(blocks) + len(answer.calls)].written
                empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written}
            case _:
                empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        yield _event("content_block_start", index=i, content_block={**block, **empty})
        yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    over: dict[str, Any] = {"stop_reason": _REASONS[answer.finish], "stop_sequence": answer.stop}
    more = {"token_ids": list(answer.tokens)} if answer.ids else {}
    yield _event("message_delta", delta=over, usage={"output_tokens": len(answer.tokens)}, **more)
    yield _event("message_stop")


def error(status: int, text: str, code: str = "") -> dict[str, Any]:
    said = f"{text} ({code})" if code else text
    return {"type": "error", "error": {"type": _KINDS.get(status, "api_error"), "message": said}}


def error_event(status: int, text: str, code: str = "") -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(error(status, text, code)) + b"\n\n"


def _head(answer: Answered) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(answer: Answered) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.thinking:
        blocks.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
    if answer.text or not answer.calls:
        blocks.append({"type": "text", "text": answer.text})
    calls = answer.calls
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)} for call in calls
    ]


def _usage(answer: Answered) -> dict[str, Any]:
    return {
        "input_tokens": len(answer.prompt) - answer.cached,
        "cache_read_input_tokens": answer.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.tokens),
    }


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + b"data: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


PING = _event("ping")
