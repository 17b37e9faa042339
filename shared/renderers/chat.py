"""Code that the renderers of chat models share: reading a checkpoint's files, reading completions, collecting bodies."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.environments import Brief, Call, Result, ToolSpec
from shared.renderers import Exchange, Reading, Tail, TooLong
from shared.renderers.calls import Calls, Part
from shared.renderers.vocabulary import Vocabulary

ROOM = 64  # tokens that an opening must leave for the attempt: one short call and its answer
SUMMARY = "\n\nYou have worked on this before. Your own summary of that work:\n"
_THINKING_OPEN = re.compile(r"<think>\s*\Z")


class UnfitCheckpoint(ValueError):
    """A checkpoint that a renderer cannot speak for; the text says what was found, what is allowed and the way out."""


class Chat(ABC):
    """Base class of chat renderers: reads completions. Subclasses write `objection`, `opening` and `answers` from their template.
    `thinking`: each generation prompt opens a block of thinking."""

    name = "chat"

    def __init__(
        self, vocabulary: Vocabulary, calls: Calls, ends: Sequence[int], context: int, *, thinking: bool = False
    ) -> None:
        self.vocabulary, self.calls, self.context = vocabulary, calls, context
        self.vocab_size = vocabulary.size
        self.stop_tokens = tuple(ends)
        self._thinking = thinking

    def reading(self, completion: Sequence[int], context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Reading:
        text, starts = self.vocabulary.spans(self.said(completion))
        parts = self.calls.parts(text, self._opened(context), {tool.name: tool.parameters for tool in tools})
        calls: list[Call] = []
        seen: set[str] = set()
        done = 0
        for part in parts:
            if part.kind == "call":
                start, end = (max(done, place) for place in _tokens(starts, part))
                done = end
                id = f"call_{len(context) + start}"  # a place in the segment: no other call has it
                while id in seen:
                    id += "a"
                seen.add(id)
                calls.append(Call(id, part.name, part.arguments, start, end, part.error))
        said = [part for part in parts if part.kind == "text" and text[part.start : part.end].strip()]
        final = (_tokens(starts, said[0])[0], _tokens(starts, said[-1])[1]) if said and not calls else None
        return Reading(
            calls=tuple(calls),
            text="".join(text[part.start : part.end] for part in parts if part.kind == "text").strip(),
            thinking="\n".join(_thought(text[part.start : part.end]) for part in parts if part.kind == "thinking"),
            final=final,
        )

    @abstractmethod
    def objection(self, brief: Brief) -> str | None:
        """Return the reason as shared.renderers.Renderer says."""

    @abstractmethod
    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        """Return the ids as shared.renderers.Renderer says."""

    @abstractmethod
    def answers(self, tail: Tail, results: Sequence[Result]) -> list[int] | None:
        """Return the ids as shared.renderers.Renderer says."""

    def asking(self, tail: Tail, results: Sequence[Result], text: str) -> list[int] | None:
        return self.answers(tail, [*results, Result(text=text)])

    def kept(self, completion: Sequence[int]) -> tuple[int, ...]:
        ids = self.said(completion)
        text, starts = self.vocabulary.spans(ids)
        said = [part for part in self.calls.parts(text, self._thinking) if part.kind == "text"]
        places = dict.fromkeys(i for part in said for i in range(*_tokens(starts, part)))
        kept = [i for i in places if ids[i] not in self.vocabulary.control_ids]
        ends = [*starts[1:], len(text)]
        while kept and not text[starts[kept[0]] : ends[kept[0]]].strip():
            del kept[0]
        while kept and not text[starts[kept[-1]] : ends[kept[-1]]].strip():
            del kept[-1]
        return tuple(ids[i] for i in kept)

    def text(self, ids: Sequence[int]) -> str:
        return self.vocabulary.text(ids)

    # For the renderers

    def said(self, completion: Sequence[int]) -> list[int]:
        """Return the completion without the token that ended it."""
        ids = list(completion)
        while ids and ids[-1] in self.stop_tokens:
            ids.pop()
        return ids

    def without_thinking(self, completion: Sequence[int]) -> tuple[int, ...]:
        """Return the completion without its blocks of thinking, and without the line ends that stood behind them."""
        text, starts = self.vocabulary.spans(completion)
        gone: set[int] = set()
        for part in self.calls.parts(text, self._thinking):
            if part.kind == "thinking":
                gone.update(range(*_tokens(starts, part)))
        left = [i for i in range(len(completion)) if i not in gone]
        ends = [*starts[1:], len(text)]
        while gone and left and not text[starts[left[0]] : ends[left[0]]].strip("\n"):
            del left[0]
        return tuple(completion[i] for i in left)

    def left_thinking(self, completion: Sequence[int], context: Sequence[int]) -> bool:
        """Return whether the completion ends within a block of thinking."""
        text, _ = self.vocabulary.spans(self.said(completion))
        parts = self.calls.parts(text, self._opened(context))
        last = parts[-1] if parts else None
        return last is not None and last.kind == "thinking" and not text[: last.end].endswith("</think>")

    def thought(self, ids: Sequence[int]) -> bool:
        """Return whether the ids hold a block of thinking."""
        if "<think>" in self.vocabulary.control:
            marks = {self.vocabulary.control.get(tag) for tag in ("<think>", "</think>")}
            return any(id in marks for id in ids)
        return "</think>" in self.vocabulary.text(ids)

    def written(self, tail: Tail, results: Sequence[Result]) -> dict[str, str]:
        """Return our call id -> the call id that the model wrote. A call without one keeps ours. Example:
        {'call_17': 'functions.read:0'}."""
        text, _ = self.vocabulary.spans(self.said(tail.completion))
        parts = [part for part in self.calls.parts(text, self._opened(tail.context)) if part.kind == "call"]
        calls = self.reading(tail.completion, tail.context).calls
        own = {call.id: part.id for call, part in zip(calls, parts, strict=True)}
        return {one.call: own.get(one.call) or one.call for one in results}

    def past(self, exchange: Exchange, objects: bool = True, nothing: str | None = "") -> list[dict[str, Any]]:
        """Return a turn that is over as messages, for a template to write it out as it sees fit. `objects`: arguments are objects,
        not text; `nothing`: what stands for no content."""
        reading = self.reading(exchange.completion, [])
        message: dict[str, Any] = {"role": "assistant", "content": reading.text}
        if reading.thinking:
            message["reasoning_content"] = reading.thinking
        if any(
            call.error for call in reading.calls
        ):  # what cannot be read is written as it stands, and answered in words
            message["content"] = self.text(self.said(exchange.completion))
            return [message, *(user(one.text) for one in exchange.results)]
        names = [f"call0000{i}" for i in range(len(reading.calls))]
        if reading.calls:
            arguments: list[Any] = [dict(call.arguments) for call in reading.calls]
            functions = [
                {"name": call.name, "arguments": of if objects else json.dumps(of, ensure_ascii=False)}
                for call, of in zip(reading.calls, arguments, strict=True)
            ]
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": function}
                for id, function in zip(names, functions, strict=True)
            ]
            message["content"] = reading.text or nothing
        ids = iter(names)
        return [
            message,
            *(
                result(next(ids, one.call), one.tool, one.text) if one.call and reading.calls else user(one.text)
                for one in exchange.results
            ),
        ]

    def _opened(self, context: Sequence[int]) -> bool:
        return bool(_THINKING_OPEN.search(self.vocabulary.text(context[-16:]))) if context else self._thinking

    def _fits(self, ids: list[int]) -> list[int]:
        if len(ids) + ROOM > self.context:
            raise TooLong(
                f"found an opening of {len(ids)} tokens; allowed: {self.context - ROOM} (a context of {self.context}, less {ROOM} "
                "for the attempt)"
            )
        return ids


def schema_of(tool: ToolSpec) -> dict[str, Any]:
    """Return a tool as chat templates read it."""
    if tool.sent is not None:
        return dict(tool.sent)
    parameters = dict(tool.parameters)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def bodies_of(brief: Brief, exchanges: Iterable[Exchange] = ()) -> list[str]:
    """Return every untrusted text: messages, tools, and results of past turns."""
    return [
        *(message.content for message in brief.messages),
        *(json.dumps(schema_of(tool), ensure_ascii=False) for tool in brief.tools),
        *(result.text for exchange in exchanges for result in exchange.results),
    ]


def shielded(vocabulary: Vocabulary, value: Any, guard: str) -> Any:
    """Return a value with every text in it shielded, names of fields that a template may print included."""
    if isinstance(value, str):
        return vocabulary.shield(value, guard)
    if isinstance(value, Mapping):
        return {
            vocabulary.shield(key, guard) if isinstance(key, str) else key: shielded(vocabulary, of, guard)
            for key, of in value.items()
        }
    if isinstance(value, list | tuple):
        return [shielded(vocabulary, of, guard) for of in value]
    return value


def groups(results: Sequence[Result]) -> list[list[Result]]:
    """Return the results in order; those of calls that follow one another are together, a message stands alone."""
    found: list[list[Result]] = []
    for result in results:
        if result.call and found and found[-1][0].call:
            found[-1].append(result)
        else:
            found.append([result])
    return found


def objection_to(brief: Brief) -> str | None:
    """Return what no chat format can write, or None."""
    if not any(message.role == "user" for message in brief.messages):
        return "messages: found none of a user; allowed: at least one"
    for i, message in enumerate(brief.messages):
        if message.role not in ("system", "user"):
            return f"messages[{i}].role: found {message.role!r}; allowed: 'system', 'user'"
        if message.role == "system" and i:
            return f"messages[{i}].role: found 'system'; allowed: as the first message alone"
    names = [tool.name for tool in brief.tools]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            return f"tools: found the name {name!r:.80}; allowed: 1 to 64 letters, digits, '_', '.' and '-'"
        if names.count(name) > 1:
            return f"tools: found the name {name!r} twice; allowed: once"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; an empty one where there is no file. Raises UnfitCheckpoint."""
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise UnfitCheckpoint(f"{path}: no JSON ({error}); allowed: a JSON object") from None
    if not isinstance(found, dict):
        raise UnfitCheckpoint(f"{path}: found no object; allowed: a JSON object")
    return found


def ends_of(directory: Path, vocabulary: Vocabulary, close: str = "") -> list[int]:
    """Return the ids that end a generation: `close` first, then those that the checkpoint's files name."""
    eos = read_json(directory / "tokenizer_config.json").get("eos_token")
    named: list[Any] = [vocabulary.control.get(close)]
    named.append(vocabulary.tokenizer.token_to_id(text) if (text := token_text(eos)) else None)
    for name in ("generation_config.json", "config.json"):
        found = read_json(directory / name).get("eos_token_id")
        named += found if isinstance(found, list) else [found]
    ids = [id for id in named if isinstance(id, int) and not isinstance(id, bool)]
    return list(dict.fromkeys(ids))


def token_text(value: Any) -> str:
    """Return the spelling of a token of tokenizer_config.json; empty where none is named."""
    return str(value.get("content", "")) if isinstance(value, dict) else value if isinstance(value, str) else ""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def result(id: str, name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "name": name, "content": text}


def _thought(block: str) -> str:
    return block.strip().removeprefix("<think>").removesuffix("</think>").strip()


def _tokens(starts: Sequence[int], part: Part) -> tuple[int, int]:
    """Return the range of tokens that hold the characters of a part."""
    first = bisect_left(starts, part.start)
    if first == len(starts) or starts[first] > part.start:
        first = bisect_left(starts, starts[first - 1]) if first else 0
    return first, max(first, bisect_left(starts, part.end))
