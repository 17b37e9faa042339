"""Proves that a Jinja chat template only appends, before anything is trained with it. Pure.

The bridge of `jinja` renders a short conversation in which a mark stands for what the assistant said, and appends what the
template writes behind that turn. `prove` tries whether this difference is the same with other marks, with and without a system
message and tools, after one to three turns, and whether what was written before stays as it was. A template that fails is
refused; the reasons name the message that made the difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.renderers.chat import result, system, user
from shared.renderers.template import PROBE_TOOL, ChatTemplate, Refused
from shared.renderers.vocabulary import Vocabulary

MARKS = ("qzxkwa", "Qzxkw Qzxkw.")  # what an assistant says in a proof; no template has these words
_TOKEN = re.compile(r"<\|[A-Za-z0-9_▁]+\|>|<｜[^｜<>\s]+｜>")
Anchor = Literal["content", "arguments"]


@dataclass(frozen=True, slots=True)
class Proof:
    """The behaviour that a template showed.

    `close`: the stop token that ends a turn without a call. None: such a turn cannot be extended; the next message opens a new
    segment. `close_calls`: the stop token that ends a turn with calls. `anchor`: where the probe puts its mark in a message with
    calls, 'content' or 'arguments'. `single`: the template accepts only one call per message. `drops`: the messages that make it
    drop the thinking of earlier turns: 'results', 'user'. `tools`: it writes the tools that are offered.
    """

    close: str | None
    close_calls: str
    anchor: Anchor
    single: bool
    drops: frozenset[str]
    tools: bool


def prove(
    template: ChatTemplate, vocabulary: Vocabulary, ends: Sequence[int], more: Mapping[str, Any]
) -> Proof | list[str]:
    """Return the proof that the template only appends, or the reasons why it cannot be had. `more`: names for the template."""
    spelling = vocabulary.spelling
    stops = [spelling[id] for id in ends if id in spelling]
    if not stops:
        return ["no stop token is an added token of the tokenizer (generation_config.json: eos_token_id)"]
    found: list[str] = []
    for anchor in ("content", "arguments"):
        for single in (False, True):
            prover = _Prover(Bridge(template, stops, more, anchor), vocabulary, single)
            proof = prover.prove()
            if proof is not None:
                return proof
            found = found or prover.reasons  # of the plainest way: the others are for templates that cannot do it
    return found


class Bridge:
    """Renders differences. `stops`: spellings of the tokens that end a generation."""

    def __init__(
        self, template: ChatTemplate, stops: Sequence[str], more: Mapping[str, Any], anchor: Anchor = "content"
    ) -> None:
        self.template, self.stops, self.more, self.anchor = template, tuple(stops), more, anchor
        self._objects = template.calls_as is None or template.calls_as[0]

    def said(self, mark: str, calls: Sequence[tuple[str, str]] = (), thinking: str = "") -> dict[str, Any]:
        """Return an assistant's message. `calls`: id and name of each."""
        content = f"<think>\n{thinking}\n</think>\n\n{mark}" if thinking else mark
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            marked = [mark if self.anchor == "arguments" and i == len(calls) - 1 else "" for i in range(len(calls))]
            message["tool_calls"] = [self._call(id, name, text) for (id, name), text in zip(calls, marked, strict=True)]
            message["content"] = content if self.anchor == "content" or thinking else ""
        return message

    def behind(
        self,
        head: Sequence[Mapping[str, Any]],
        message: Mapping[str, Any],
        following: Sequence[Mapping[str, Any]],
        mark: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, str]:
        """Return the token that closes the message, and what stands behind it. Raises Refused."""
        text = self.template.render([*head, message, *following], tools, self.more)
        if text.count(mark) != 1:
            times = f"writes what the assistant said {text.count(mark)} times"
            raise Refused(f"it {times if mark in text else 'leaves out what the assistant said'}")
        at = text.index(mark) + len(mark)
        found = [(place, stop) for stop in self.stops if (place := text.find(stop, at)) >= 0]
        if not found:
            raise Refused(f"no stop token ({', '.join(self.stops)}) stands behind what the assistant said")
        place, stop = min(found)
        return stop, text[place + len(stop) :]

    def _call(self, id: str, name: str, mark: str) -> dict[str, Any]:
        arguments: Any = {"a": mark} if mark else {}
        if not self._objects:
            arguments = f'{{"a": "{mark}"}}' if mark else "{}"
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


class _Prover:
    def __init__(self, bridge: Bridge, vocabulary: Vocabulary, single: bool) -> None:
        self.bridge, self.template, self.more = bridge, bridge.template, bridge.more
        self.vocabulary, self.single = vocabulary, single
        self.reasons: list[str] = []

    def prove(self) -> Proof | None:
        """Return the proof, or None and have `reasons`."""
        self._require_tokens()
        closes = {self._closes(results) for results in (1, 2)}
        if self.reasons:
            return None
        if len(closes) > 1:
            self.reasons.append(f"a turn with calls is closed by {' or '.join(sorted(map(str, closes)))}")
            return None
        close = self._closes(0)  # None: such a turn is not continued, which is no reason to refuse the template
        self.reasons.clear()
        drops = frozenset(kind for kind in ("results", "user") if self._drops(kind))
        return Proof(close, str(closes.pop()), self.bridge.anchor, self.single, drops, self.template.writes_tools)

    def _closes(self, results: int) -> str | None:
        """Return the token that closes a turn before so many results, 0: before a message of the user. None, with a reason: the
        difference depends on something."""
        what = f"{results} result{'s' * (results > 1)}" if results else "a message of the user"
        seen: dict[tuple[str, str], str] = {}
        for name, head, tools in self._heads():
            for mark in MARKS:
                try:
                    found = self._difference(results, head, mark, tools)
                except Refused as error:
                    self.reasons.append(f"{what} after {name}: {error}")
                    return None
                seen.setdefault(found, name)
                if len(seen) > 1:
                    first, other = seen.values()
                    self.reasons.append(
                        f"{what}: what stands behind the turn before differs between {first} and {other}"
                    )
                    return None
        ((close, _),) = seen
        return close

    def _difference(self, results: int, head: Any, mark: str, tools: Any) -> tuple[str, str]:
        ids = [(f"call0000{i}", f"f{i}") for i in range(results)]
        following = [result(id, name, f"r{i}") for i, (id, name) in enumerate(ids)] or [user("r0")]
        message = self.bridge.said(mark, ids[:1] if self.single else ids)
        opening = self.template.render(head, tools, self.more)
        longer = self.template.render([*head, message, *following], tools, self.more)
        at = opening.rfind("end of head")
        if at < 0:
            raise Refused("it leaves out or rewrites what was said to the assistant")
        if not longer.startswith(opening[: at + len("end of head")]):
            raise Refused("what was written before it is written otherwise")
        return self.bridge.behind(head, message, following, mark, tools)

    def _heads(self) -> Iterator[tuple[str, list[dict[str, Any]], Any]]:
        """Yield beginnings of a conversation: with and without tools and a system message, and after one to three turns."""
        first = user("u, end of head")
        calls = [("call00009", "f9")]
        turn = [self.bridge.said("s", calls), result(*calls[0], "r9, end of head")]
        yield "a first message", [first], None
        yield "a first message with tools", [first], [PROBE_TOOL]
        try:
            self.template.render([system("s"), first], [PROBE_TOOL], self.more)
            yield "a system message", [system("s"), first], [PROBE_TOOL]
        except Refused:
            pass  # `objection` says so of a brief that has one
        for n in (1, 2, 3):
            yield f"{n} turn{'s' * (n > 1)} before", [first, *turn * n], [PROBE_TOOL]

    def _drops(self, kind: str) -> bool:
        """Return whether the template drops a turn's thinking when a message of this kind follows."""
        thinking = "qzxkwt"
        calls = [("call00001", "f")] if kind == "results" else []
        following = result("call00001", "f", "r") if kind == "results" else user("r")
        try:
            text = self.template.render(
                [user("u"), self.bridge.said(MARKS[0], calls, thinking), following], None, self.more
            )
        except Refused:
            return True
        return thinking not in text

    def _require_tokens(self) -> None:
        """Add a reason if the template writes control tokens that the tokenizer lacks, or refuses a message of the user."""
        turns = [self.bridge.said("s", [("call00009", "f9")]), result("call00009", "f9", "r")]
        for messages in ([user("u"), *turns], [user("u")]):
            try:
                text = self.template.render(messages, [PROBE_TOOL], self.more)
            except Refused as error:
                refused = str(error)
                continue
            unknown = [token for token in dict.fromkeys(_TOKEN.findall(text)) if token not in self.vocabulary.control]
            if unknown:
                self.reasons.append(
                    f"it writes {', '.join(unknown)}, which the tokenizer does not have as added tokens"
                )
            return
        self.reasons.append(f"a message of the user alone: {refused}")
