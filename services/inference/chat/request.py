"""What /v1/chat/completions is asked, in OpenAI's words: read, and refused where it cannot be served as asked. Pure.

Fields that would change the distribution, the prompt or the form of the answer are refused unless they ask for what is done
anyway, and so is what is almost the name of a field that is read. Others are ignored: OpenAI's clients send much that an
engine has no use for. Errors name the field, what was found and what is allowed.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from services.inference.wire import BIASED, NESTED, NEUTRAL, BadRequest, refuse_others, refuse_slips

ROLES = ("system", "developer", "user", "assistant", "tool")
CHOICES = ("none", "auto")
MAX_STOPS = 4  # OpenAI's limit; each is searched for after every token
LONGEST_STOP = 1024  # characters; every beginning of it may be the end of what was sampled so far
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")

# OpenAI's fields that ask for another form of answer, and the values that ask for the one there is.
PLAIN: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0, None),
    "parallel_tool_calls": (True, None),
    "response_format": ({"type": "text"}, None),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (["text"], None),
    "audio": (None,),
}
# What clients of SGLang and vLLM ask for beside OpenAI's fields, of another distribution, another end or another prompt.
BESIDE: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, None),
    "min_tokens": (0, None),
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "ignore_eos": (False, None),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "guided_json": (None,),
    "guided_regex": (None, ""),
    "guided_choice": (None, []),
    "guided_grammar": (None, ""),
    "structured_outputs": (None, {}),
    "logits_processors": (None, []),
    "custom_logit_processor": (None, ""),
    "lora_path": (None, ""),
    "continue_final_message": (False, None),
    "add_generation_prompt": (True, None),
    "chat_template": (None, ""),
    "documents": (None, []),
    "truncate_prompt_tokens": (None,),
}


# What the OpenAPI document says of a field beyond its type. Here it binds nobody: `_check` refuses, and says what is allowed.
Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
Text = Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
OfFunction = Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
Limit = Annotated[int, Meta(extra_json_schema={"minimum": 1})]
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(1 << 63), "maximum": (1 << 63) - 1})]
Temperature = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 100})]
Stop = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": LONGEST_STOP})]
Choice = Annotated[str, Meta(extra_json_schema={"enum": list(CHOICES)})]


class ContentPart(msgspec.Struct, kw_only=True):
    type: Text
    text: str = ""


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str = "{}"  # a JSON object


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: OfFunction = "function"


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Role
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: OfFunction = "function"
    function: Function


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1})]
    model: str | None = None  # told back; a replica serves one
    tools: list[Tool] | None = None
    tool_choice: Choice | dict[str, Any] | None = None
    temperature: Temperature | None = None
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None  # its older name
    stop: Stop | list[Stop] | None = None
    seed: Seed | None = None
    logprobs: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # for the template, e.g. {"enable_thinking": false}

    @property
    def limit(self) -> int | None:
        """Tokens at most; None: what the context has room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model hears of. With `none` of no tool, so that it has none to call."""
        return [] if self.tool_choice == "none" else self.tools or []


_DECODER = msgspec.json.Decoder(ChatRequest)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SAMPLING = {name: allowed for name, allowed in NEUTRAL.items() if name != "stop"}  # served here, in text
_KNOWN = {*ChatRequest.__struct_fields__, *NEUTRAL, *PLAIN, *BESIDE}


def read(body: bytes) -> ChatRequest:
    """Raises BadRequest."""
    try:
        asked = _DECODER.decode(body or b"{}")
        fields = _FIELDS.decode(body or b"{}")
        for neutral, why in ((_SAMPLING, BIASED), (PLAIN, ""), (BESIDE, "")):
            refuse_others({n: msgspec.json.decode(fields[n]) for n in neutral if n in fields}, neutral, why=why)
        refuse_slips(fields, _KNOWN)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"request body: {error}") from None
    except RecursionError:
        raise BadRequest(NESTED) from None
    _check(asked)
    return asked


def turns(asked: ChatRequest) -> list[dict[str, Any]]:
    """The messages as chat templates read them: content is text, arguments are objects. Raises BadRequest."""
    return [_turn(f"messages[{i}]", message) for i, message in enumerate(asked.messages)]


def schemas(asked: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as chat templates read them."""
    return [msgspec.to_builtins(tool) for tool in asked.offered] or None


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
    for i, tool in enumerate(asked.tools or []):
        if tool.type != "function":
            raise BadRequest(f"tools[{i}].type: found {tool.type!r}; allowed: 'function'")
    for name in _RESERVED:
        if name in (asked.chat_template_kwargs or {}):
            raise BadRequest(f"chat_template_kwargs: found {name!r}; allowed: names besides {', '.join(_RESERVED)}")


def _turn(where: str, message: ChatMessage) -> dict[str, Any]:
    if message.role not in ROLES:
        raise BadRequest(f"{where}.role: found {message.role!r}; allowed: {', '.join(map(repr, ROLES))}")
    # OpenAI's newer name: templates do not know it, and some leave out in silence what they do not know.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(where, message.content)}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        turn["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in calls]
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


def _text(where: str, content: str | list[ContentPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for i, part in enumerate(content):
        if part.type != "text":
            raise BadRequest(f"{where}.content[{i}].type: found {part.type!r}; allowed: 'text'")
    return "".join(part.text for part in content)


def _call(where: str, call: ToolCall) -> dict[str, Any]:
    if call.type != "function":
        raise BadRequest(f"{where}.type: found {call.type!r}; allowed: 'function'")
    try:
        arguments = msgspec.json.decode(call.function.arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{where}.function.arguments: {error}; allowed: a JSON object in a string") from None
    if not isinstance(arguments, dict):
        found = call.function.arguments[:40]
        raise BadRequest(f"{where}.function.arguments: found {found!r}; allowed: a JSON object in a string")
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function, **({} if call.id is None else {"id": call.id})}
