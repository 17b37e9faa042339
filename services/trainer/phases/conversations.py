"""Sequences of conversations in JSONL, through the checkpoint's renderer.

A line: {"messages": [{"role", "content", "tool_calls", "reasoning_content", "tool_call_id"}, …], "tools": […]}, in the form of
OpenAI's API. What the assistant wrote has weight 1, its stop token too; everything else has `context_weight`.

Each turn is written as the format writes it, then read back as the agent reads a completion. A turn that reads otherwise is
refused: the policy would learn something that no agent understands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from services.trainer.packing import TrainSequence
from services.trainer.phases.data import supervised
from shared.contracts.allowed import shown
from shared.environments import Brief, Message, Result, ToolSpec
from shared.renderers import Exchange, Renderer, Said, Tail, TooLong, Unwritable, Writer

ROLES = ("system", "user", "assistant", "tool")


class BadConversation(ValueError):
    """A conversation cannot be trained on. The text names the file, the line, the field, what was found and what is allowed."""


class Unfit(ValueError):
    """The same without file and line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the assistant, `at` its place in `messages`, and the messages that answer it."""

    at: int
    said: Said
    ids: tuple[str, ...]  # of its calls, as the file names them
    following: tuple[tuple[int, Mapping[str, Any]], ...]


@dataclass(slots=True)
class Left:
    """Conversations left out because they are too long, and those taken."""

    taken: int = 0
    too_long: int = 0


def read(
    path: Path,
    renderer: Renderer,
    *,
    length: int,
    too_long: Literal["refuse", "leave_out"] = "refuse",
    context_weight: float = 0.0,
    left: Left | None = None,
) -> Iterator[TrainSequence]:
    """Yield the sequences of a file. `length`: fed tokens of a sequence, at most. Raises BadConversation."""
    left = Left() if left is None else left
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadConversation(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = list(sequences_of(_object(line), renderer, length, context_weight))
        except TooLong as error:
            if too_long == "refuse":
                raise BadConversation(
                    f"{path}, line {number}: messages: {error}; or data.too_long = 'leave_out'"
                ) from None
            left.too_long += 1
            continue
        except Unfit as error:
            raise BadConversation(f"{path}, line {number}: {error}") from None
        left.taken += 1
        yield from found


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise Unfit("found no JSON; allowed: one JSON object a line") from None
    if not isinstance(found, dict):
        raise Unfit("found no object; allowed: an object with messages")
    return found


def sequences_of(
    conversation: Mapping[str, Any], renderer: Renderer, length: int, context_weight: float = 0.0
) -> Iterator[TrainSequence]:
    """Yield a conversation's sequences: one, or more where the format begins a segment again (shared.renderers.Renderer.answers).
    Raises Unfit; TooLong if one has more than `length` fed tokens."""
    brief, turns = _parts(conversation)
    if (objection := renderer.objection(brief)) is not None and "opening of" not in objection:
        raise Unfit(objection)
    if not callable(getattr(renderer, "completion", None)):
        raise Unfit(
            f"messages: format {renderer.name!r} writes no assistant's turns; allowed: a checkpoint of the format chatml or jinja, "
            "or recorded trajectories (data.trajectories)"
        )
    ids = renderer.opening(brief)
    weights = [context_weight] * len(ids)
    exchanges: list[Exchange] = []
    for turn in turns:
        completion, calls = _written(renderer, turn, brief, ids)
        tail = Tail(list(ids), completion, brief)
        ids, weights = [*ids, *completion], [*weights, *[1.0] * len(completion)]
        if not turn.following:
            break
        results = _results(turn, calls)
        exchanges.append(Exchange(tuple(completion), tuple(results)))
        answer = renderer.answers(tail, results)
        if answer is None:
            yield _sequence(ids, weights, length)
            ids = renderer.opening(brief, history=exchanges)
            weights = [0.0] * len(ids)
        else:
            ids, weights = [*ids, *answer], [*weights, *[context_weight] * len(answer)]
    yield _sequence(ids, weights, length)


def _sequence(ids: Sequence[int], weights: Sequence[float], length: int) -> TrainSequence:
    if len(ids) - 1 > length:
        raise TooLong(f"found {len(ids) - 1} tokens; allowed: {length} (data.length)")
    weight = np.asarray(weights, np.float32)
    weight[0] = 0.0
    return supervised(np.asarray(ids, np.int64), weight)


def _written(renderer: Renderer, turn: Turn, brief: Brief, context: Sequence[int]) -> tuple[list[int], list[str]]:
    """Return the completion, and the ids under which its calls are answered. Raises Unfit unless it reads as it was meant."""
    place = f"messages[{turn.at}]"
    try:
        completion = cast(Writer, renderer).completion(turn.said, brief)
    except Unwritable as error:
        raise Unfit(f"{place}.{error}") from None
    reading = renderer.reading(completion, context, brief.tools)
    broken = next((call.error for call in reading.calls if call.error), None)
    read = [(call.name, dict(call.arguments)) for call in reading.calls]
    if broken or read != [(name, dict(arguments)) for name, arguments in turn.said.calls]:
        what = broken or f"{len(read)} calls: {shown([name for name, _ in read])}"
        raise Unfit(
            f"{place}.tool_calls: format {renderer.name} reads {what}; allowed: calls that read as they are written"
        )
    for name, meant, found in (
        ("content", turn.said.text, reading.text),
        ("reasoning_content", turn.said.thinking, reading.thinking),
    ):
        if meant.strip() != found.strip():
            raise Unfit(
                f"{place}.{name}: format {renderer.name} reads {shown(found)} where {shown(meant)} was written; "
                "allowed: text without the format's own marks"
            )
    return completion, [call.id for call in reading.calls]


def _results(turn: Turn, calls: Sequence[str]) -> list[Result]:
    names = dict(zip(turn.ids, zip(calls, (name for name, _ in turn.said.calls), strict=True), strict=True))
    results = []
    for at, message in turn.following:
        text = _text(message, f"messages[{at}]")
        if message["role"] == "tool":
            call, name = names.pop(message.get("tool_call_id") or next(iter(names), ""), ("", ""))
            if not call:
                allowed = ", ".join(names) or "none: every call is answered"
                raise Unfit(
                    f"messages[{at}].tool_call_id: found {shown(message.get('tool_call_id'))}; allowed: {allowed}"
                )
            results.append(Result(call, name, text))
        else:
            results.append(Result(text=text))
    if names:
        raise Unfit(
            f"messages[{turn.at}].tool_calls: found no answer to {next(iter(names))!r}; allowed: one for each call"
        )
    return results


# Reading a line


def _parts(conversation: Mapping[str, Any]) -> tuple[Brief, list[Turn]]:
    messages = conversation.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Unfit(f"messages: found {shown(messages)}; allowed: a list of messages")
    for at, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise Unfit(f"messages[{at}].role: found {shown(role)}; allowed: {', '.join(ROLES)}")
        if role == "system" and at:
            raise Unfit(f"messages[{at}].role: found 'system'; allowed: as the first message alone")
    places = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise Unfit("messages: found none of an assistant; allowed: at least one, for nothing else is learned")
    if places[-1] != len(messages) - 1:
        found = messages[-1]["role"]
        raise Unfit(f"messages[{len(messages) - 1}].role: found {found!r}; allowed: 'assistant', as the last message")
    head = messages[: places[0]]
    if not any(message["role"] == "user" for message in head):
        raise Unfit("messages: found none of a user before the assistant's first; allowed: at least one")
    if head[-1]["role"] == "tool" or any(message["role"] == "tool" for message in head):
        raise Unfit("messages: found a result of a tool before the assistant's first message; allowed: behind a call")
    brief = Brief(
        tuple(Message(message["role"], _text(message, f"messages[{at}]")) for at, message in enumerate(head)),
        tuple(_tools(conversation.get("tools"))),
    )
    ends = [*places[1:], len(messages)]
    turns = []
    for at, end in zip(places, ends, strict=True):
        following = tuple((i, messages[i]) for i in range(at + 1, end))
        if end < len(messages) and not following:
            raise Unfit(f"messages[{end}].role: found 'assistant' twice in a row; allowed: an answer between the two")
        said, ids = _said(messages[at], f"messages[{at}]")
        turns.append(Turn(at, said, ids, following))
    return brief, turns


def _text(message: Mapping[str, Any], place: str) -> str:
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if content is None and message["role"] == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, str):
        raise Unfit(f"{place}.content: found {shown(content)}; allowed: a text, or parts of type text")
    return content


def _said(message: Mapping[str, Any], place: str) -> tuple[Said, tuple[str, ...]]:
    calls, ids = [], []
    listed = message.get("tool_calls") or []
    if not isinstance(listed, list):
        raise Unfit(f"{place}.tool_calls: found {shown(listed)}; allowed: a list of calls")
    for number, call in enumerate(listed):
        where = f"{place}.tool_calls[{number}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unfit(f"{where}: found {shown(function)}; allowed: an object with name and arguments")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise Unfit(f"{where}.arguments: found {shown(arguments)}; allowed: a JSON object") from None
        if not isinstance(arguments, dict):
            raise Unfit(f"{where}.arguments: found {shown(arguments)}; allowed: a JSON object")
        calls.append((function["name"], arguments))
        ids.append(str(call.get("id") or f"#{number}"))
    if len(set(ids)) != len(ids):
        raise Unfit(f"{place}.tool_calls: found one id twice; allowed: an id of its own for each call")
    thinking = message.get("reasoning_content") or ""
    if not isinstance(thinking, str):
        raise Unfit(f"{place}.reasoning_content: found {shown(thinking)}; allowed: a text")
    return Said(_text(message, place), thinking, tuple(calls)), tuple(ids)


def _tools(listed: Any) -> Iterator[ToolSpec]:
    if listed is None:
        return
    if not isinstance(listed, list):
        raise Unfit(f"tools: found {shown(listed)}; allowed: a list of tools")
    for number, tool in enumerate(listed):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Unfit(
                f"tools[{number}].function: found {shown(function)}; allowed: an object with name and parameters"
            )
        parameters = function.get("parameters", {})
        if not isinstance(parameters, dict):
            raise Unfit(f"tools[{number}].function.parameters: found {shown(parameters)}; allowed: a JSON schema")
        yield ToolSpec(function["name"], str(function.get("description", "")), parameters)
