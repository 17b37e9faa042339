"""ChatML with Hermes' calls: Qwen2.5, Qwen3, SmolLM2 and models of our own.

    <|im_start|>system↵ system, tools <|im_end|>↵
    <|im_start|>user↵ task <|im_end|>↵
    <|im_start|>assistant↵ [<think>↵]  sampled: text, calls <|im_end|>
    ↵<|im_start|>user↵<tool_response>↵ result ↵</tool_response>↵<tool_response>↵ … <|im_end|>↵ <|im_start|>assistant↵

The engine stops at `<|im_end|>`, so the newline behind it is the first id of an answer. A role and its body are encoded in one
pass between two control tokens. `opening` gives the ids that the checkpoint's own template gives (`detect` holds it to that).

Fields of the card (etude.json), beside `format` and `context`:

    calls     the reader of calls: hermes (default), hermes-list
    tools     how tools are told: qwen (default: one JSON schema a line), short (one line of words each)
    results   user (default: consecutive results share one turn of the user), tool (a turn of the role `tool` each)
    system    what stands in the system turn of a conversation that has none; empty (default): no such turn
    thinking  none (default), model (the model opens it), open (the prompt opens it), closed (the prompt closes it at once)
    drops_thinking   the template drops earlier thinking once the user speaks again (Qwen3); default false
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.environments import Brief, Result, ToolSpec
from shared.renderers import Exchange, Said, Tail, Unwritable
from shared.renderers.calls import UnknownCalls, load_calls
from shared.renderers.calls.hermes import CLOSE, OPEN
from shared.renderers.card import CARD
from shared.renderers.chat import (
    ROOM,
    SUMMARY,
    Chat,
    UnfitCheckpoint,
    bodies_of,
    ends_of,
    groups,
    objection_to,
    read_json,
    schema_of,
)
from shared.renderers.vocabulary import BadTokenizer, Vocabulary

NAME = "chatml"
BEGIN, END = "<|im_start|>", "<|im_end|>"
# What the prompt writes where the assistant's turn begins.
PROMPTS = {"none": "", "model": "", "open": "<think>\n", "closed": "<think>\n\n</think>\n\n"}
QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of etude.json that this renderer reads."""

    context: Annotated[int, Meta(gt=ROOM)]
    format: Literal["chatml"] = "chatml"
    calls: str = "hermes"
    tools: Literal["qwen", "short"] = "qwen"
    results: Literal["user", "tool"] = "user"
    system: str = ""
    thinking: Literal["none", "model", "open", "closed"] = "none"
    drops_thinking: bool = False


class ChatML(Chat):
    """Implements shared.renderers.Renderer."""

    name = NAME

    def __init__(self, vocabulary: Vocabulary, card: Card, ends: Sequence[int] = ()) -> None:
        for token in (BEGIN, END):
            if token not in vocabulary.control:
                raise UnfitCheckpoint(
                    f"tokenizer.json: found no added token {token}; allowed: a tokenizer that has it, for {NAME}"
                )
        try:
            calls = load_calls(card.calls)
        except UnknownCalls as error:
            raise UnfitCheckpoint(f"{CARD}: {error}") from None
        if card.tools == "qwen" and card.calls != "hermes":
            raise UnfitCheckpoint(
                f"{CARD}: calls: found {card.calls!r} with tools 'qwen'; allowed: 'hermes', or tools 'short'"
            )
        self.card, self._close = card, vocabulary.control[END]
        stops = tuple(dict.fromkeys((self._close, *ends)))
        super().__init__(vocabulary, calls, stops, card.context, thinking=card.thinking == "open")

    @classmethod
    def load(cls, directory: Path) -> ChatML:
        """Return the renderer of a checkpoint directory. Raises UnfitCheckpoint."""
        try:
            vocabulary = Vocabulary.load(directory)
        except BadTokenizer as error:
            raise UnfitCheckpoint(str(error)) from None
        return cls(vocabulary, card_of(read_json(directory / CARD)), ends_of(directory, vocabulary, END))

    def objection(self, brief: Brief) -> str | None:
        try:
            reason = objection_to(brief)
            if reason is None:
                self.opening(brief)
        except (ValueError, TypeError, RecursionError) as error:
            reason = f"messages: {error}"
        return reason

    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        guard = self.vocabulary.guard([*bodies_of(brief, history), self.card.system])
        head, last = self._head(brief, guard)
        if summary:
            ids = [*self.vocabulary.ids(f"{head}{last}{SUMMARY}", guard), *summary, *self.vocabulary.ids(f"{END}\n")]
        else:
            ids = self.vocabulary.ids(f"{head}{last}{END}\n", guard)
        forgotten = self._forgotten(history)
        for i, exchange in enumerate(history):
            ids += self._past(exchange, guard, forget=i < forgotten)
        return self._fits([*ids, *self.vocabulary.ids(self._prompt())])

    def answers(self, tail: Tail, results: Sequence[Result]) -> list[int] | None:
        asks = any(not result.call for result in results)
        if asks and self.card.drops_thinking and (self.thought(tail.context) or self.thought(tail.completion)):
            return None
        guard = self.vocabulary.guard(result.text for result in results)
        text = self._closing(tail.completion, tail.context) + self._results(results, guard) + self._prompt()
        return self.vocabulary.ids(text, guard)

    def completion(self, said: Said, brief: Brief) -> list[int]:
        """Return the ids as shared.renderers.Writer says."""
        calls = [json.dumps({"name": n, "arguments": dict(of)}, ensure_ascii=False) for n, of in said.calls]
        guard = self.vocabulary.guard([said.text, said.thinking, *calls])
        text, thinking, *calls = (self.vocabulary.shield(one, guard) for one in (said.text, said.thinking, *calls))
        parts = [text] if text else []
        if calls and self.calls.name == "hermes-list":
            parts.append(f"{OPEN}[\n" + ",\n".join(calls) + f"\n]{CLOSE}")
        elif self.calls.name == "hermes":
            parts += [f"{OPEN}\n{call}\n{CLOSE}" for call in calls]
        elif calls:
            raise Unwritable(f"tool_calls: found some; allowed: none with calls {self.calls.name!r} ({CARD})")
        body = "\n".join(parts)
        if self.card.thinking in ("none", "closed") and thinking:
            raise Unwritable(
                f"reasoning_content: found some; allowed: none with thinking {self.card.thinking!r} ({CARD})"
            )
        if self.card.thinking == "open":
            body = f"{thinking}\n</think>\n\n{body}"
        elif thinking:
            body = f"<think>\n{thinking}\n</think>\n\n{body}"
        return self.vocabulary.ids(f"{body}{END}", guard)

    # Pieces of text, bodies shielded

    def _head(self, brief: Brief, guard: str) -> tuple[str, str]:
        """Return all turns of the brief but the last, and the last one without its end."""
        turns = [(message.role, self.vocabulary.shield(message.content, guard)) for message in brief.messages]
        system = turns.pop(0)[1] if turns and turns[0][0] == "system" else None
        if system is None and self.card.system:
            system = self.vocabulary.shield(self.card.system, guard)
        if brief.tools:
            tools = self._tools(brief.tools, guard)
            system = tools if system is None else f"{system}\n\n{tools}"
        if system is not None:
            turns.insert(0, ("system", system))
        written = [f"{BEGIN}{role}\n{body}" for role, body in turns]
        return "".join(f"{turn}{END}\n" for turn in written[:-1]), written[-1]

    def _tools(self, tools: Sequence[ToolSpec], guard: str) -> str:
        if self.card.tools == "short":
            lines = [self.vocabulary.shield(in_words(tool), guard) for tool in tools]
            return "Tools:\n" + "\n".join(lines) + f"\nTo call one, write:\n{self.calls.form}"
        schemas = (json.dumps(schema_of(tool), ensure_ascii=False) for tool in tools)
        before, behind = QWEN_TOOLS
        return before + "".join(f"\n{self.vocabulary.shield(schema, guard)}" for schema in schemas) + behind

    def _results(self, results: Sequence[Result], guard: str) -> str:
        text = ""
        for group in groups(results):
            bodies = [self.vocabulary.shield(result.text, guard) for result in group]
            if not group[0].call:
                text += f"{BEGIN}user\n{bodies[0]}{END}\n"
            elif self.card.results == "tool":
                text += "".join(f"{BEGIN}tool\n{body}{END}\n" for body in bodies)
            else:
                responses = "".join(f"\n<tool_response>\n{body}\n</tool_response>" for body in bodies)
                text += f"{BEGIN}user{responses}{END}\n"
        return text

    def _prompt(self) -> str:
        return f"{BEGIN}assistant\n{PROMPTS[self.card.thinking]}"

    def _closing(self, completion: Sequence[int], context: Sequence[int]) -> str:
        """Return the text that ends the assistant's turn. A limit may have cut the turn short, even within its thinking."""
        if completion and completion[-1] == self._close:
            return "\n"
        thinking = "\n</think>\n\n" if self.left_thinking(completion, context) else ""
        return f"{thinking}{END}\n"

    # Turns that are over

    def _forgotten(self, history: Sequence[Exchange]) -> int:
        """Return how many of the first turns the template writes without their thinking."""
        asked = [i + 1 for i, exchange in enumerate(history) if any(not result.call for result in exchange.results)]
        return asked[-1] if asked and self.card.drops_thinking else 0

    def _past(self, exchange: Exchange, guard: str, *, forget: bool) -> list[int]:
        opens = "" if forget or self.card.thinking != "open" else PROMPTS["open"]
        before = self.vocabulary.ids(f"{BEGIN}assistant\n{opens}")
        said: Sequence[int] = exchange.completion
        if forget:
            said = self.without_thinking(said)
        return [
            *before,
            *said,
            *self.vocabulary.ids(self._closing(said, before) + self._results(exchange.results, guard), guard),
        ]


def card_of(card: Mapping[str, Any]) -> Card:
    """Return the card's fields. Raises UnfitCheckpoint."""
    try:
        return msgspec.convert(dict(card), Card)
    except msgspec.ValidationError as error:
        raise UnfitCheckpoint(
            f"{CARD}: {error}; allowed: as shared/renderers/formats/chatml.py lists its fields"
        ) from None


def in_words(tool: ToolSpec) -> str:
    """Return a tool in one line: `read(path: string, start?: integer) - reads a file`."""
    required = tool.parameters.get("required", ())
    arguments = (
        f"{name}{'' if name in required else '?'}: {about.get('type', 'any') if isinstance(about, Mapping) else 'any'}"
        for name, about in tool.parameters.get("properties", {}).items()
    )
    return f"{tool.name}({', '.join(arguments)}) - {tool.description}"


def load(directory: Path) -> ChatML:
    """Return the renderer of a checkpoint directory. Raises ValueError with the reason."""
    return ChatML.load(directory)
