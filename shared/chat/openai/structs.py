"""The structs that read a chat request, field by field. `fields` says what becomes of every other field."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

ROLES = ("system", "developer", "user", "assistant", "tool")
CHOICES = ("none", "auto")
LONGEST_STOP = 1024  # characters; every beginning of it may be the end of what was sampled so far

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
    arguments: str | dict[str, Any] | None = "{}"  # a JSON object in a string, as OpenAI says, or as it is


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
    reasoning: str | None = None  # its newer name


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: OfFunction = "function"
    function: Function


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, kw_only=True, dict=True):
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
    reasoning_effort: str | None = None  # a name for the template
    chat_template_kwargs: dict[str, Any] | None = None  # for the template, e.g. {"enable_thinking": false}
    return_token_ids: bool | None = None  # answer `prompt_token_ids`, and `token_ids` of each choice, as vLLM does

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
