"""A model behind an OpenAI-compatible chat endpoint: the same environment, in messages and tools.

The endpoint gives text, not ids. The conversation is kept as messages here and sent as it is; the ids that the agent loop
records are the built-in format's, so that turns, roles and results have their places in the trajectory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from services.rollout.byhand.builtin import BYTES_PER_TOKEN
from services.rollout.byhand.scripted import generation
from services.rollout.engine_client import retry_after_s
from services.rollout.generation import Generation
from shared.environments import Brief, Call, InfrastructureError, Result, ToolSpec
from shared.renderers import Exchange, Reading, Tail
from shared.renderers.calls import Malformed, json_object
from shared.renderers.chat import schema_of
from shared.renderers.formats.chatml import ChatML

TRIES = 5
FIRST_DELAY_S = 1.0
PATIENCE_S = 600.0
SHOWN = 300  # characters of what a server says


@dataclass(slots=True)
class Completions:
    """Implements services.rollout.agent.Model and shared.renderers.Renderer for one attempt. Use as an async context manager."""

    url: str
    model: str
    key: str
    chat: ChatML
    temperature: float
    seed: int | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    said: Reading = field(default_factory=Reading)  # the last reply
    name: str = "chat completions"
    http: aiohttp.ClientSession | None = None
    vocab_size: int = field(init=False)
    context: int = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size, self.context = self.chat.vocab_size, self.chat.context

    async def __aenter__(self) -> Completions:
        self.http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S))
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.http is not None:
            await self.http.close()

    # The model

    @property
    def partial(self) -> Generation | None:
        return None

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self.messages,
            "temperature": self.temperature,
            "max_tokens": max(1, max_new_tokens // BYTES_PER_TOKEN),
        }
        if self.tools:
            body["tools"] = self.tools
        if self.seed is not None:
            body["seed"] = self.seed
        message, finish = _message(await self._ask(body))
        self.messages.append(message)
        ids, self.said = self._written(message, len(tokens))
        return generation(ids, cut=finish == "length")

    async def _ask(self, body: Mapping[str, Any]) -> Any:
        """Return the answer's JSON. Raises InfrastructureError."""
        assert self.http is not None
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        delay, url = FIRST_DELAY_S, f"{self.url}/chat/completions"
        for left in reversed(range(TRIES)):
            try:
                async with self.http.post(url, json=body, headers=headers) as response:
                    text = await response.text(errors="replace")
                    if response.status == 200:
                        return json.loads(text)
                    error = f"HTTP {response.status}: {text[:SHOWN]}"
                    if response.status not in (408, 425, 429) and response.status < 500:
                        raise InfrastructureError(f"{url} refused the request: {error}")
                    if "Retry-After" in response.headers:
                        delay = retry_after_s(response.headers["Retry-After"])
            except (aiohttp.ClientError, OSError, TimeoutError) as problem:
                error = f"{type(problem).__name__}: {problem}"
            except (ValueError, RecursionError):
                raise InfrastructureError(f"{url}: found no JSON in its answer: {text[:SHOWN]!r}") from None
            if left:
                await asyncio.sleep(delay)
                delay *= 2
        raise InfrastructureError(f"{url} does not answer: {error}")

    def _written(self, message: Mapping[str, Any], place: int) -> tuple[list[int], Reading]:
        """Return a reply in the ids of the built-in format, and what it says. `place`: where it begins."""
        vocabulary, ids = self.chat.vocabulary, []
        thinking = str(message.get("reasoning_content") or message.get("reasoning") or "")
        if thinking:
            ids += vocabulary.plain(f"<think>\n{thinking}\n</think>\n")
        start, text = len(ids), str(message.get("content") or "")
        ids += vocabulary.plain(text)
        final = (start, len(ids))
        calls = []
        for number, call in enumerate(message.get("tool_calls") or []):
            name, arguments, error = _called(call)
            start = len(ids)
            ids += vocabulary.plain(f"<tool_call>\n{_object(name, arguments)}\n</tool_call>")
            id = str(call.get("id") or f"call_{place}_{number}")
            calls.append(Call(id, name, arguments if isinstance(arguments, dict) else {}, start, len(ids), error))
        ids.append(self.chat.stop_tokens[0])
        return ids, Reading(tuple(calls), text, thinking, final if text.strip() and not calls else None)

    # The renderer

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self.chat.stop_tokens

    def objection(self, brief: Brief) -> str | None:
        return self.chat.objection(brief)

    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        self.messages = [{"role": message.role, "content": message.content} for message in brief.messages]
        self.tools = [schema_of(tool) for tool in brief.tools]
        return self.chat.opening(brief)

    def reading(self, completion: Sequence[int], context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Reading:
        return self.said

    def answers(self, tail: Tail, results: Sequence[Result]) -> list[int] | None:
        for result in results:
            if result.call:
                self.messages.append({"role": "tool", "tool_call_id": result.call, "content": result.text})
            else:
                self.messages.append({"role": "user", "content": result.text})
        return self.chat.answers(tail, results)

    def asking(self, tail: Tail, results: Sequence[Result], text: str) -> list[int] | None:
        return None

    def kept(self, completion: Sequence[int]) -> tuple[int, ...]:
        return self.chat.kept(completion)

    def text(self, ids: Sequence[int]) -> str:
        return self.chat.text(ids)


def _message(answer: Any) -> tuple[dict[str, Any], str]:
    """Return the assistant's message and why it ended. Raises InfrastructureError."""
    try:
        choice = answer["choices"][0]
        message, finish = choice["message"], str(choice.get("finish_reason") or "")
        kept = {"role": "assistant", "content": message.get("content") or ""}
        for name in ("tool_calls", "reasoning_content", "reasoning"):
            if message.get(name):
                kept[name] = message[name]
        calls = kept.get("tool_calls", [])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise TypeError("tool_calls is no list of objects")
        return _encodable(kept), finish
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise InfrastructureError(f"the endpoint's answer is no chat completion ({error}): {_shown(answer)}") from None


def _encodable(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with U+FFFD for half characters, which no tokenizer takes. Raises RecursionError."""
    text = json.dumps(message, ensure_ascii=False)
    whole: dict[str, Any] = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return whole


def _shown(answer: Any) -> str:
    try:
        return f"{answer!r:.{SHOWN}}"
    except RecursionError:
        return "nested too deeply to be shown"


def _called(call: Mapping[str, Any]) -> tuple[str, dict[str, Any] | str, str | None]:
    """Return name, arguments and error of a call as the endpoint wrote it. With an error, the arguments are text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return "", {}, f"the call is {call!r:.80}; allowed: a function with a name and arguments"
    written = function.get("arguments") or {}
    text = written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
    try:
        return function["name"], json_object(text if text.strip() else "{}", "arguments"), None
    except Malformed as error:
        return function["name"], text, str(error)


def _object(name: str, arguments: dict[str, Any] | str) -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(name)}, "arguments": {written}}}'
