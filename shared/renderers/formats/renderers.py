"""The families that the PyPI package `renderers` knows (extra `renderers`): DeepSeek-V3, Kimi K2, GLM, Qwen3.5, MiniMax, Nemotron …

The package writes; reading is done by our own readers of calls, with their errors and token ranges. It gets a tokenizer of ours:
bodies come to it shielded (`vocabulary`), and the tokenizer takes the guard out again, so that no text of a file
becomes a control token, which with the package alone it would. Nothing of it needs transformers.

Fields of the card (etude.json), beside `format` ("renderers:NAME", NAME as the package spells it) and `context`:

    calls     the reader of calls (see shared.renderers.calls); may be left out for the families of READERS
    template  fields of the package's configuration for that family, e.g. {"enable_thinking": false}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.environments import Brief, Result
from shared.renderers import Exchange, Tail
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
from shared.renderers.vocabulary import BadTokenizer, Vocabulary

PREFIX = "renderers:"
# The reader of each family's calls; a card for another one names its own.
READERS = {
    "deepseek-v3": "deepseek-fenced",
    "deepseek-r1": "deepseek-fenced",
    "kimi-k2": "kimi",
    "kimi-k2.5": "kimi",
    "glm-4.5": "glm",
    "glm-5": "glm",
    "llama-3": "llama",
    "qwen3": "hermes",
    "qwen3.5": "qwen-xml",
    "qwen3.6": "qwen-xml",
    "nemotron-3": "qwen-xml",
}
# gpt-oss bypasses our tokenizer, so bodies could not be shielded. `custom` may load any code. `auto` and `default` name no family.
NOT_SERVED = frozenset({"auto", "custom", "default", "gpt-oss"})


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of etude.json that this renderer reads."""

    format: Annotated[str, Meta(pattern="^renderers:.+")]
    context: Annotated[int, Meta(gt=ROOM)]
    calls: str = ""
    template: dict[str, Any] = {}


class Shielding:
    """The tokenizer that the package is given. `guard`: the guard in the text that is being written; empty: none."""

    name_or_path = "etude"
    unk_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos: int | None) -> None:
        self._vocabulary, self.eos_token_id, self.guard = vocabulary, eos, ""

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._vocabulary.ids(text, self.guard)

    def decode(self, ids: Any, *_: Any, **__: Any) -> str:
        return self._vocabulary.text([ids] if isinstance(ids, int) else list(ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._vocabulary.tokenizer.token_to_id(tokens)
        return [self._vocabulary.tokenizer.token_to_id(token) for token in tokens]


class Packaged(Chat):
    """Writes prompts with the PyPI package `renderers`, and reads completions with our own readers of calls.

    Implements shared.renderers.Renderer.
    """

    def __init__(self, vocabulary: Vocabulary, card: Card, ends: Sequence[int]) -> None:
        self.name = card.format
        self._tokenizer = Shielding(vocabulary, ends[0] if ends else None)
        self._package = _renderer(card, self._tokenizer)
        try:
            calls = load_calls(card.calls or READERS.get(card.format.removeprefix(PREFIX), ""))
        except UnknownCalls as error:
            raise UnfitCheckpoint(f"{CARD}: {error}") from None
        stops = tuple(dict.fromkeys((*self._package.get_stop_token_ids(), *ends)))
        super().__init__(vocabulary, calls, stops, card.context)
        prompt = vocabulary.text(self._package.render_ids([user("a")], add_generation_prompt=True))
        self._thinking = prompt.rstrip().endswith("<think>")

    @classmethod
    def load(cls, directory: Path) -> Packaged:
        """Return the renderer of a checkpoint directory. Raises UnfitCheckpoint."""
        try:
            card = msgspec.convert(read_json(directory / CARD), Card)
            vocabulary = Vocabulary.load(directory)
        except msgspec.ValidationError as error:
            raise UnfitCheckpoint(
                f"{CARD}: {error}; allowed: as shared/renderers/formats/renderers.py lists its fields"
            ) from None
        except BadTokenizer as error:
            raise UnfitCheckpoint(str(error)) from None
        return cls(vocabulary, card, ends_of(directory, vocabulary))

    def objection(self, brief: Brief) -> str | None:
        try:
            reason = objection_to(brief)
            if reason is None:
                self.opening(brief)
        except Exception as error:  # the package raises whatever it likes
            return f"messages: {error}"
        return reason

    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        past = [message for exchange in history for message in self.past(exchange)]
        guard = self._tokenizer.guard = self.vocabulary.guard([*bodies_of(brief, history), json.dumps(past)])
        messages = [{"role": m.role, "content": self.vocabulary.shield(m.content, guard)} for m in brief.messages]
        place = f"{guard}summary{guard}"
        if summary:
            last = max(i for i, message in enumerate(messages) if message["role"] == "user")
            messages[last]["content"] += SUMMARY + place
        tools = [shielded(self.vocabulary, schema_of(tool), guard) for tool in brief.tools] or None
        everything = [*messages, *(shielded(self.vocabulary, message, guard) for message in past)]
        self._tokenizer.guard = guard
        if not summary:
            return self._fits(self._package.render_ids(everything, tools=tools, add_generation_prompt=True))
        return self._fits(self._around(everything, tools, place, summary))

    def answers(self, tail: Tail, results: Sequence[Result]) -> list[int] | None:
        written = self.written(tail, [one for one in results if one.call])
        texts = [text for one in results for text in (one.text, one.tool)]
        guard = self.vocabulary.guard([*texts, *written.values()])
        shield = self.vocabulary.shield
        messages = [
            result(shield(written[one.call], guard), shield(one.tool or "unknown", guard), shield(one.text, guard))
            if one.call
            else user(shield(one.text, guard))
            for one in results
        ]
        self._tokenizer.guard = guard
        tools = [shielded(self.vocabulary, schema_of(tool), guard) for tool in tail.brief.tools] or None
        before = [*tail.context, *tail.completion]
        bridged = self._package.bridge_to_next_turn(list(tail.context), list(tail.completion), messages, tools=tools)
        if bridged is None or bridged.token_ids[: len(before)] != before:
            return None
        return list(bridged.token_ids[len(before) :])

    def _around(self, messages: list[Any], tools: Any, place: str, summary: Sequence[int]) -> list[int]:
        """Render twice, with '0' and with '1' in place of the mark. Return the common first ids, the summary's ids, and the common
        last ids."""
        both = []
        for mark in "01":
            said = [{**m, "content": m["content"].replace(place, mark)} if m.get("content") else m for m in messages]
            both.append(self._package.render_ids(said, tools=tools, add_generation_prompt=True))
        one, other = both
        before = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
        behind = next(i for i, (a, b) in enumerate(zip(reversed(one), reversed(other), strict=False)) if a != b)
        return [*one[:before], *summary, *one[len(one) - behind :]]


def _renderer(card: Card, tokenizer: Shielding) -> Any:
    """Return the package's renderer. Raises UnfitCheckpoint."""
    name = card.format.removeprefix(PREFIX)
    if name in NOT_SERVED:
        raise UnfitCheckpoint(
            f"{CARD}: format: found {card.format!r}; allowed: a family of the package, or format 'jinja'"
        )
    try:
        from renderers import config_from_name, create_renderer
    except ImportError:
        raise UnfitCheckpoint(
            f"{CARD}: format: found {card.format!r}, and the package `renderers` is not installed; install etude[renderers]"
        ) from None
    try:
        plain = config_from_name(name)
        return create_renderer(tokenizer, type(plain)(**card.template))
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnfitCheckpoint(
            f"{CARD}: format: found {card.format!r}; the package refuses it with this tokenizer: {str(error)[:300]}; allowed: the "
            "family that the checkpoint's tokens belong to"
        ) from None


def families() -> Mapping[str, Any]:
    """Return the package's families by name; none where it is not installed."""
    try:
        from renderers import configs
    except ImportError:
        return {}
    found = {cls.model_fields["name"].default: cls for cls in configs.BaseRendererConfig.__subclasses__()}
    return {name: cls for name, cls in found.items() if name not in NOT_SERVED}


def load(directory: Path) -> Packaged:
    """Return the renderer of a checkpoint directory. Raises ValueError with the reason."""
    return Packaged.load(directory)
