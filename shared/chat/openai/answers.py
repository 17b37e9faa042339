"""Answers and errors in the form of OpenAI's chat completions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from shared.chat import Answered, Called

_REASONS = {"stop": "stop", "stop_sequence": "stop", "length": "length", "tool_calls": "tool_calls"}
DONE = b"data: [DONE]\n\n"
PING = b": still sampling\n\n"  # a comment, which clients pass over


def completion(answer: Answered) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.thinking:
        message["reasoning_content"] = message["reasoning"] = answer.thinking
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": _REASONS[answer.finish],
        "logprobs": _logprobs(answer),
        **({"token_ids": list(answer.tokens)} if answer.ids else {}),
    }
    return {**_head(answer, "chat.completion"), **_prompt(answer), "choices": [choice], "usage": _usage(answer)}


def events(answer: Answered, *, usage: bool) -> Iterator[bytes]:
    """Yield the answer as server-sent events. `usage`: a last event tells it."""
    role = {"role": "assistant", "content": ""}
    yield _event({**_chunk(answer, role), **_prompt(answer)})
    if answer.thinking:
        yield _event(_chunk(answer, {"reasoning_content": answer.thinking, "reasoning": answer.thinking}))
    if answer.text:
        yield _event(_chunk(answer, {"content": answer.text}))
    for i, call in enumerate(answer.calls):
        yield _event(_chunk(answer, {"tool_calls": [{"index": i, **_call(call)}]}))
    more: dict[str, Any] = {"finish_reason": _REASONS[answer.finish], "logprobs": _logprobs(answer)}
    yield _event(_chunk(answer, {}, **more, **({"token_ids": list(answer.tokens)} if answer.ids else {})))
    if usage:
        yield _event({**_head(answer, "chat.completion.chunk"), "choices": [], "usage": _usage(answer)})
    yield DONE


def error(status: int, message: str, code: str = "") -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or None}}


def error_event(status: int, message: str, code: str = "") -> bytes:
    return _event(error(status, message, code))


def _head(answer: Answered, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _prompt(answer: Answered) -> dict[str, Any]:
    return {"prompt_token_ids": list(answer.prompt)} if answer.ids else {}


def _chunk(answer: Answered, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None, **more}
    return {**_head(answer, "chat.completion.chunk"), "choices": [choice]}


def _call(call: Called) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.written}}


def _usage(answer: Answered) -> dict[str, Any]:
    return {
        "prompt_tokens": len(answer.prompt),
        "completion_tokens": len(answer.tokens),
        "total_tokens": len(answer.prompt) + len(answer.tokens),
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }


def _logprobs(answer: Answered) -> dict[str, Any] | None:
    if not answer.logprobs:
        return None
    told = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(answer.spellings, answer.logprobs, strict=True)
    ]
    return {"content": told}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
