"""What /v1/messages is asked, in Anthropic's words, read into the house's own types. Pure.

A field is served, neutral (refused unless it asks for what is done anyway), ignored (nothing of the answer depends on it), or
refused by its name. Errors name the field, what was found and what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from shared.chat import Asked, Called, Turn
from shared.chat.openai.structs import LONGEST_STOP
from shared.chat.refusing import BIASED, MOST_SHOWN, NESTED, BadRequest, refuse_others, refuse_unknown
from shared.environments import ToolSpec

MAX_STOPS = 16  # each is searched for after every token
_SAMPLING: dict[str, tuple[Any, ...]] = {"top_p": (None, 1), "top_k": (None, 0, -1)}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "thinking": (None, {"type": "disabled"}),
    "container": (None,),
    "mcp_servers": (None, []),
    "context_management": (None,),
    "output_config": (None, {}),
    "output_format": (None,),
}
_IGNORED = frozenset(
    {"metadata", "service_tier", "cache_control", "inference_geo", "betas", "speed", "user_profile_id"}
)
_TOOL_NEUTRAL: dict[str, tuple[Any, ...]] = {"defer_loading": (False, None), "allowed_callers": (None, ["direct"])}
_KEPT = frozenset({"cache_control", "citations", "signature", "caller"})  # clients send them back with an answer
_TEXT, _USE, _RESULT = ("type", "text"), ("type", "id", "name", "input"), ("type", "tool_use_id", "content", "is_error")
_THINKING, _REDACTED = ("type", "thinking"), ("type", "data")
_MESSAGE = ("role", "content")


class _Tool(msgspec.Struct, kw_only=True):
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None


class Request(msgspec.Struct, kw_only=True):
    """The fields of `/v1/messages` that are read."""

    messages: list[dict[str, Any]]
    max_tokens: int
    model: str = "etude"
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    return_token_ids: bool | None = None  # not Anthropic's: answer `prompt_token_ids` and `token_ids`


_FIELDS = msgspec.json.Decoder(dict[str, Any])
_COUNT = {"max_tokens": 1}


def asked_of(body: bytes, *, counting: bool = False) -> Asked:
    """Return what a request asks. `counting`: of /v1/messages/count_tokens, which has no `max_tokens`. Raises BadRequest."""
    try:
        fields = _FIELDS.decode(body or b"{}")
        asked = msgspec.convert({**_COUNT, **fields} if counting else fields, Request)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body: {error}") from None
    except RecursionError:
        raise BadRequest(NESTED) from None
    refuse_others(fields, _SAMPLING, why=BIASED)
    refuse_others(fields, _NEUTRAL)
    refuse_unknown(fields, Request.__struct_fields__, {*_SAMPLING, *_NEUTRAL, *_IGNORED}, where="")
    _check(asked)
    system = [Turn("system", _system(asked.system))] if asked.system else []
    turns = [turn for i, message in enumerate(asked.messages) for turn in _turns(f"messages[{i}]", message)]
    return Asked(
        turns=(*system, *turns),
        tools=_tools(asked),
        model=asked.model,
        most=asked.max_tokens,
        stops=tuple(asked.stop_sequences or ()),
        temperature=asked.temperature,
        stream=bool(asked.stream),
        ids=bool(asked.return_token_ids),
    )


def _check(asked: Request) -> None:
    if not asked.messages:
        raise BadRequest("messages: found none; allowed: 1 and more")
    if asked.max_tokens < 1:
        raise BadRequest(f"max_tokens: found {asked.max_tokens}; allowed: 1 and more")
    if asked.temperature is not None and not (math.isfinite(asked.temperature) and 0 <= asked.temperature <= 100):
        raise BadRequest(f"temperature: found {asked.temperature!r}; allowed: 0..100")
    stops = asked.stop_sequences or []
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop_sequences: found {len(stops)}; allowed: at most {MAX_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= LONGEST_STOP:
            raise BadRequest(f"stop_sequences: found {len(stop)} characters; allowed: 1..{LONGEST_STOP}")
    choice = asked.tool_choice or {"type": "auto"}
    if choice.get("type") not in ("auto", "none"):
        raise BadRequest(
            f"tool_choice: found {choice!r:.80}; allowed: 'auto', 'none'. No call can be forced: sampling is not constrained"
        )
    if choice.get("disable_parallel_tool_use"):
        raise BadRequest("tool_choice.disable_parallel_tool_use: found True; allowed: False")


def _system(found: str | list[dict[str, Any]]) -> str:
    return found if isinstance(found, str) else _text("system", found)


def _tools(asked: Request) -> tuple[ToolSpec, ...]:
    if (asked.tool_choice or {}).get("type") == "none":
        return ()
    return tuple(_tool(f"tools[{i}]", raw) for i, raw in enumerate(asked.tools or ()))


def _tool(where: str, raw: dict[str, Any]) -> ToolSpec:
    refuse_others(raw, _TOOL_NEUTRAL, where=f"{where}.")
    if raw.get("type") not in (None, "custom"):
        raise BadRequest(f"{where}.type: found {raw['type']!r:.80}; allowed: 'custom'. No tool runs on this side")
    # Claude's own fields of a tool, which no prompt of another model has words for.
    taken = {*_TOOL_NEUTRAL, "cache_control", "strict", "eager_input_streaming", "input_examples"}
    refuse_unknown(raw, _Tool.__struct_fields__, taken, where=f"{where}.")
    try:
        tool = msgspec.convert(raw, _Tool)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {error}") from None
    return ToolSpec(tool.name, tool.description, tool.input_schema, "runs")


def _turns(where: str, message: dict[str, Any]) -> Iterator[Turn]:
    refuse_unknown(message, _MESSAGE, {"cache_control", "id", "type", "model"}, where=f"{where}.")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(
            f"{where}.role: found {role!r:.40}; allowed: 'user', 'assistant' (`system` is a field of the request)"
        )
    if isinstance(content, str):
        yield Turn(role, content)
    elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise BadRequest(f"{where}.content: found {content!r:.80}; allowed: text, or a list of blocks")
    elif role == "assistant":
        yield _assistant(f"{where}.content", content)
    else:
        yield from _user(f"{where}.content", content)


def _user(where: str, blocks: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """Results come first, as Anthropic demands of clients; the text of the message follows as one turn."""
    texts: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            _known(f"{where}[{i}]", block, _RESULT)
            said = block.get("content") or ""
            text = said if isinstance(said, str) else _text(f"{where}[{i}].content", said)
            yield Turn("tool", text, answers=_word(f"{where}[{i}]", block, "tool_use_id"))
        else:
            texts.append(block)
    if texts:
        yield Turn("user", _text(where, texts))


def _assistant(where: str, blocks: Sequence[dict[str, Any]]) -> Turn:
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        here = f"{where}[{i}]"
        match block.get("type"):
            case "text":
                texts.append(_text(where, [block]))
            case "thinking":
                _known(here, block, _THINKING)
                thoughts.append(_word(here, block, "thinking"))
            case "redacted_thinking":
                _known(here, block, _REDACTED)
            case "tool_use":
                _known(here, block, _USE)
                given = block.get("input") or {}
                if not isinstance(given, dict):
                    raise BadRequest(f"{here}.input: found {given!r:.80}; allowed: an object")
                name, id = _word(here, block, "name"), _word(here, block, "id")
                calls.append(Called(id, name, given, json.dumps(given, ensure_ascii=False)))
            case other:
                raise _refused(here, other, "'text', 'thinking', 'tool_use'")
    return Turn("assistant", "".join(texts), "\n".join(thoughts), tuple(calls))


def _text(where: str, blocks: Any) -> str:
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise BadRequest(f"{where}: found {blocks!r:.80}; allowed: text, or a list of blocks")
    for i, block in enumerate(blocks):
        if block.get("type") != "text":
            raise _refused(f"{where}[{i}]", block.get("type"), "'text', 'tool_result'")
        _known(f"{where}[{i}]", block, _TEXT)
    return "".join(_word(f"{where}[{i}]", block, "text") for i, block in enumerate(blocks))


def _refused(where: str, found: Any, allowed: str) -> BadRequest:
    return BadRequest(f"{where}.type: found {found!r:.60}; allowed: {allowed}")


def _known(where: str, block: dict[str, Any], served: Sequence[str]) -> None:
    """Fields that are null say nothing: clients send back all that their own types have."""
    said = {name: value for name, value in block.items() if value is not None}
    refuse_unknown(said, served, _KEPT, where=f"{where}.")


def _word(where: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name}: found {repr(value)[:MOST_SHOWN]}; allowed: a string")
    return value
