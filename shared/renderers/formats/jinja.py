"""Writes with any Jinja chat template that only appends (`proof` checks that it does).

`opening` is the template's own text. An answer is a difference: the renderer renders a short conversation with a mark in place
of what the assistant said, and appends the text that the template writes behind that turn.

Fields of the card (etude.json), beside `format` and `context`:

    calls     the reader of calls (see shared.renderers.calls)
    template  names for the template, e.g. {"enable_thinking": false}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.environments import Brief, Result
from shared.renderers import Exchange, Said, Tail, Unwritable
from shared.renderers.calls import UnknownCalls, load_calls
from shared.renderers.card import CARD
from shared.renderers.chat import (
    ROOM,
    SUMMARY,
    Chat,
    UnfitCheckpoint,
    bodies_of,
    ends_of,
    objection_to,
    read_json,
    result,
    schema_of,
    shielded,
    user,
)
from shared.renderers.proof import MARKS, Bridge, Proof, prove
from shared.renderers.template import BadTemplate, ChatTemplate, Refused
from shared.renderers.vocabulary import BadTokenizer, Vocabulary

NAME = "jinja"
WAY_OUT = (
    "allowed: a template that only appends; `--format chatml` for a ChatML model, `--format renderers:NAME` with the package "
    "`renderers`, or the family's training variant of the template"
)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of etude.json that this renderer reads."""

    context: Annotated[int, Meta(gt=ROOM)]
    calls: str
    format: Literal["jinja"] = "jinja"
    template: dict[str, Any] = {}


class Jinja(Chat):
    """Implements shared.renderers.Renderer."""

    name = NAME

    def __init__(
        self, vocabulary: Vocabulary, template: ChatTemplate, card: Card, ends: Sequence[int], proof: Proof
    ) -> None:
        try:
            calls = load_calls(card.calls)
        except UnknownCalls as error:
            raise UnfitCheckpoint(f"{CARD}: {error}") from None
        self.card, self.template, self.proof = card, template, proof
        spelling = vocabulary.spelling
        self._bridge = Bridge(template, [spelling[id] for id in ends if id in spelling], card.template, proof.anchor)
        prompt = template.render([user("u")], None, card.template).rstrip()
        super().__init__(vocabulary, calls, ends, card.context, thinking=prompt.endswith("<think>"))

    @classmethod
    def load(cls, directory: Path) -> Jinja:
        """Return the renderer of a checkpoint directory, once its template is proved. Raises UnfitCheckpoint."""
        try:
            card = msgspec.convert(read_json(directory / CARD), Card)
        except msgspec.ValidationError as error:
            raise UnfitCheckpoint(
                f"{CARD}: {error}; allowed: as shared/renderers/formats/jinja.py lists its fields"
            ) from None
        vocabulary, template, ends = parts_of(directory)
        proof = prove(template, vocabulary, ends, card.template)
        if isinstance(proof, list):
            raise UnfitCheckpoint(
                f"the chat template of {directory.name} cannot be appended to: {'; '.join(proof)}; {WAY_OUT}"
            )
        return cls(vocabulary, template, card, ends, proof)

    def objection(self, brief: Brief) -> str | None:
        try:
            if (reason := objection_to(brief)) is not None:
                return reason
            if brief.tools and not self.proof.tools:
                return (
                    "tools: the checkpoint's chat template has no word for them; allowed: none, or a format that tells of tools "
                    "(`--format chatml`, `--format renderers:NAME`)"
                )
            self.opening(brief)
        except (ValueError, TypeError, RecursionError) as error:
            return f"messages: {error}"
        return None

    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        past = [
            message for exchange in history for message in self.past(exchange, *(self.template.calls_as or (True, "")))
        ]
        guard = self.vocabulary.guard([*bodies_of(brief, history), json.dumps(past)])
        messages = [{"role": m.role, "content": self.vocabulary.shield(m.content, guard)} for m in brief.messages]
        place = f"{guard}summary{guard}"
        if summary:
            messages = _with_summary(messages, f"{SUMMARY}{place}")
        tools = [shielded(self.vocabulary, schema_of(tool), guard) for tool in brief.tools] or None
        text = self.template.render(
            [*messages, *(shielded(self.vocabulary, m, guard) for m in past)], tools, self.card.template
        )
        before, _, behind = text.partition(place)
        ids = self.vocabulary.ids(before, guard)
        return self._fits([*ids, *summary, *self.vocabulary.ids(behind, guard)] if summary else ids)

    def answers(self, tail: Tail, results: Sequence[Result]) -> list[int] | None:
        kinds = {"results" if one.call else "user" for one in results}
        if kinds & self.proof.drops and (
            self.thought(tail.completion) or ("user" in kinds and self.thought(tail.context))
        ):
            return None
        called = [one for one in results if one.call]
        if not called and self.proof.close is None:
            return None
        written = self.written(tail, called)
        names = {one.call: one.tool or "unknown" for one in called}  # as the model wrote them
        texts = [*(one.text for one in results), *written.values(), *names.values()]
        guard, mark = self.vocabulary.guard(texts), _unused(texts)
        shield = self.vocabulary.shield
        ids = [(shield(written[one.call], guard), shield(names[one.call], guard)) for one in called]
        message = self._bridge.said(mark, ids[:1] if self.proof.single else ids)
        try:
            close, text = self._bridge.behind([user("u")], message, self._messages(results, ids, guard), mark)
        except Refused:  # none that the proof has met: a new segment may do what this turn cannot
            return None
        closed = bool(tail.completion) and tail.completion[-1] == self.vocabulary.control[close]
        if not closed:
            thinking = "\n</think>\n\n" if self.left_thinking(tail.completion, tail.context) else ""
            text = f"{thinking}{close}{text}"
        return self.vocabulary.ids(text, guard)

    def completion(self, said: Said, brief: Brief) -> list[int]:
        """Return the ids as shared.renderers.Writer says: what the template writes for the turn, up to its stop token."""
        objects, nothing = self.template.calls_as or (True, "")
        if said.calls and self.template.calls_as is None:
            raise Unwritable("tool_calls: found some; allowed: none, for the checkpoint's template writes no calls")
        field = self.template.thought_as
        if said.thinking and field is None:
            raise Unwritable("reasoning_content: found some; allowed: none, for the checkpoint's template writes none")
        message: dict[str, Any] = {"role": "assistant", "content": said.text or (nothing if said.calls else "")}
        if said.thinking and field:
            message[field] = said.thinking
        if said.calls:
            arguments = [dict(of) if objects else json.dumps(of, ensure_ascii=False) for _, of in said.calls]
            message["tool_calls"] = [
                {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": of}}
                for i, ((name, _), of) in enumerate(zip(said.calls, arguments, strict=True))
            ]
        guard = self.vocabulary.guard([json.dumps(message, ensure_ascii=False), *bodies_of(brief)])
        tools = [shielded(self.vocabulary, schema_of(tool), guard) for tool in brief.tools] or None
        try:
            before = self.template.render([user("u")], tools, self.card.template)
            whole = self.template.render(
                [user("u"), shielded(self.vocabulary, message, guard)], tools, self.card.template, prompt=False
            )
        except Refused as error:
            raise Unwritable(f"content: the checkpoint's template refuses it: {error}") from None
        if not whole.startswith(before):
            raise Unwritable("content: the checkpoint's template writes a turn otherwise than its prompt begins one")
        ids = self.vocabulary.ids(whole[len(before) :], guard)
        stop = next((at for at, id in enumerate(ids) if id in self.stop_tokens), None)
        if stop is None:
            raise Unwritable("content: the checkpoint's template closes the turn with no stop token")
        return ids[: stop + 1]

    def _messages(self, results: Sequence[Result], ids: Sequence[tuple[str, str]], guard: str) -> list[dict[str, Any]]:
        named = iter(ids)
        shielded_texts = ((one, self.vocabulary.shield(one.text, guard)) for one in results)
        return [result(*next(named), text) if one.call else user(text) for one, text in shielded_texts]


def parts_of(directory: Path) -> tuple[Vocabulary, ChatTemplate, list[int]]:
    """Return vocabulary, template and stop tokens of a checkpoint directory. Raises UnfitCheckpoint."""
    try:
        vocabulary = Vocabulary.load(directory)
        template = ChatTemplate.load(directory)
    except (BadTokenizer, BadTemplate) as error:
        raise UnfitCheckpoint(str(error)) from None
    if template is None:
        raise UnfitCheckpoint(
            f"{directory}: found no chat template; allowed: chat_template.jinja, or `--format chatml`"
        )
    return vocabulary, template, ends_of(directory, vocabulary)


def _with_summary(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    return [{**m, "content": m["content"] + text} if i == last else m for i, m in enumerate(messages)]


def _unused(texts: Sequence[str]) -> str:
    """Return a word that none of the texts holds, to mark the place of what the assistant said."""
    mark = MARKS[0]
    while any(mark in text for text in texts):
        mark += "a"
    return mark


def load(directory: Path) -> Jinja:
    """Return the renderer of a checkpoint directory. Raises ValueError with the reason."""
    return Jinja.load(directory)
