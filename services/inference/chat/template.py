"""How the served checkpoint speaks: messages to token ids by its own chat template, and which tokens of an answer are text.

The template, its tokenizer and the readers of calls are those that rollouts use (shared.renderers). Text of the messages never
becomes a control token, but for what an assistant's message says of thinking and calls: it comes from the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.inference.chat.calls import CLOSE, HERMES, OPEN
from services.inference.wire import BadRequest
from shared.chat.openai.request import THOUGHT, Arguments
from shared.renderers import template as jinja
from shared.renderers.calls import Calls, UnknownCalls, load_calls
from shared.renderers.card import CARD
from shared.renderers.chat import UnfitCheckpoint, ends_of, read_json, shielded
from shared.renderers.detect import calls_of
from shared.renderers.vocabulary import BadTokenizer, Vocabulary

FILE, CONFIG = jinja.FILE, jinja.CONFIG
_THINKING_OPEN = re.compile(r"<think>\s*\Z")


class ChatTemplate:
    """`tokenizer`: the checkpoint's. `calls`: the reader of its calls; None: none here reads them. `stop_tokens`: end an answer.
    `hidden`: tokens that are no text; `hidden_from_readers`: those that no reader of calls needs."""

    def __init__(
        self, vocabulary: Vocabulary, template: jinja.ChatTemplate, calls: Calls | None, ends: Sequence[int]
    ) -> None:
        self.vocabulary, self._template, self.calls = vocabulary, template, calls
        self.tokenizer: Tokenizer = vocabulary.tokenizer
        self.stop_tokens = frozenset(ends)
        tags = {
            vocabulary.control[tag] for tag in (OPEN, CLOSE) if tag in vocabulary.control
        }  # text, however they are marked
        self.hidden = frozenset((vocabulary.special - tags) | self.stop_tokens)
        marks = {vocabulary.control[mark] for mark in (calls or HERMES).marks if mark in vocabulary.control}
        self.hidden_from_readers = frozenset((self.hidden - marks) | self.stop_tokens)

    def prompt(
        self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: Mapping[str, Any], *, context: int
    ) -> list[int]:
        """The ids that an answer to the messages goes on from, at most `context` of them. Raises BadRequest."""
        speaks = self._template.for_tools if tools else self._template
        self._require_words(speaks, turns, tools)
        messages = [_as_written(speaks, turn) for turn in turns]
        try:
            guard = self.vocabulary.guard(_texts([messages, tools]))
            shown = [self._shielded(message, guard) for message in messages]
            text = speaks.render(shown, shielded(self.vocabulary, tools, guard), more)
        except jinja.Refused as error:
            raise BadRequest(f"messages: the checkpoint's chat template refuses them: {error}") from None
        except ValueError as error:
            raise BadRequest(f"messages: {error}") from None
        if len(text) > context * self.vocabulary.longest:
            # known without the time and the memory that it would take to count them
            raise BadRequest(f"messages: with the tools they are {len(text)} characters; allowed: {context} tokens")
        ids = self.vocabulary.ids(text, guard)
        if not 0 < len(ids) <= context:
            raise BadRequest(f"messages: with the tools they are {len(ids)} tokens; allowed: 1..{context}")
        return ids

    def opens_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether an answer to the prompt begins within a block of thinking."""
        return bool(_THINKING_OPEN.search(self.vocabulary.text(prompt[-16:])))

    def _require_words(
        self, speaks: jinja.ChatTemplate, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> None:
        """Raises BadRequest where the template would leave out in silence what is asked."""
        if tools and not speaks.writes_tools:
            raise BadRequest(
                f"tools: found {len(tools)}; allowed: none with this checkpoint, whose chat template has no word for tools"
            )
        if tools and self.calls is None:
            raise BadRequest(
                f"tools: found {len(tools)}; allowed: none with this checkpoint, which writes calls in a form that is not read "
                "here (etude.json: calls)"
            )
        for i, turn in enumerate(turns):
            if calls := turn.get("tool_calls"):
                _require_calls(speaks, f"messages[{i}]", len(calls), turn["content"])

    def _shielded(self, message: Mapping[str, Any], guard: str) -> dict[str, Any]:
        """What an assistant said keeps the tags that its text is divided by."""
        kept = {name: message[name] for name in ("role",) if name in message}
        if message["role"] == "assistant" and isinstance(message.get("content"), str):
            kept["content"] = self._said(message["content"], guard)
        return {**shielded(self.vocabulary, {k: v for k, v in message.items() if k not in kept}, guard), **kept}

    def _said(self, text: str, guard: str) -> str:
        """Shielded, but for tokens that are text in an answer too: `<think>` and calls' tags."""
        shield = self.vocabulary.shield(text, guard)
        for tag, id in self.vocabulary.control.items():
            if id not in self.hidden:
                shield = shield.replace(tag[0] + guard + tag[1:], tag)
        return shield


def load(directory: Path) -> ChatTemplate:
    """Of a checkpoint directory. Raises BadRequest where it has none, or none that can be read."""
    try:
        template = jinja.ChatTemplate.load(directory)
        if template is None or not (directory / "tokenizer.json").is_file():
            lacks = (
                "tokenizer.json" if template is not None else f"chat template ({FILE}, or `chat_template` in {CONFIG})"
            )
            raise BadRequest(
                f"messages: the served checkpoint has no {lacks}, and so no text can be written for it; send token ids to "
                "/generate, or serve a checkpoint that has one"
            )
        vocabulary = Vocabulary.load(directory)
        ends = ends_of(directory, vocabulary)
        return ChatTemplate(vocabulary, template, _calls(directory, template, vocabulary, ends), ends)
    except (jinja.BadTemplate, BadTokenizer, UnfitCheckpoint, UnknownCalls) as error:
        said = str(error).replace(f"{directory}/", "")
        raise BadRequest(f"messages: the served checkpoint's chat template cannot be read: {said[:500]}") from None


def _calls(directory: Path, template: jinja.ChatTemplate, vocabulary: Vocabulary, ends: Sequence[int]) -> Calls | None:
    """The reader that the checkpoint's card names; without one, the reader that reads what its template writes."""
    named = read_json(directory / CARD).get("calls")
    if named is not None:
        return load_calls(named)
    found = calls_of(template.for_tools, vocabulary, ends)
    return load_calls(found) if found else None


def _require_calls(speaks: jinja.ChatTemplate, where: str, number: int, text: str) -> None:
    here = "with this checkpoint, whose chat template"
    if speaks.calls_as is None:
        raise BadRequest(f"{where}.tool_calls: found {number}; allowed: none {here} writes no calls")
    if number > 1 and not speaks.writes_several:
        raise BadRequest(f"{where}.tool_calls: found {number}; allowed: 1 {here} writes one call a turn")
    if text and not speaks.writes_beside_text:
        raise BadRequest(
            f"{where}.content: found {text[:40]!r} beside tool_calls; allowed: null {here} would leave the calls out"
        )


def _as_written(speaks: jinja.ChatTemplate, turn: Mapping[str, Any]) -> dict[str, Any]:
    """A message as this template takes it: some want null for no content, some the arguments as text, some another name for
    reasoning."""
    turn = {speaks.thought_as or name if name == THOUGHT else name: of for name, of in turn.items()}
    if not turn.get("tool_calls") or speaks.calls_as is None:
        return turn
    objects, nothing = speaks.calls_as
    calls = [{**call, "function": _function(call["function"], objects)} for call in turn["tool_calls"]]
    return {**turn, "content": turn["content"] or nothing, "tool_calls": calls}


def _function(function: Mapping[str, Any], objects: bool) -> dict[str, Any]:
    arguments = function["arguments"]
    written = arguments.written if isinstance(arguments, Arguments) else arguments
    return {**function, "arguments": dict(arguments) if objects else written}


def _texts(value: Any) -> list[str]:
    """Every text within a value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    return [text for part in value for text in _texts(part)] if isinstance(value, list | tuple) else []
