"""Renderers: how a brief, tool calls and results are written in token ids, and read back.

A renderer is pure. Within a segment it only appends: sampled ids are never encoded again, and each answer follows what the
engine has seen. When a segment is reopened from `history`, `jinja` and `renderers:NAME` render past turns again, as context that
is not trained on. The agent loop, the recorder and the console know only this Protocol; `registry` finds the renderer that
a checkpoint's card (etude.json) names.

Invariants of every renderer:
- Text of files, tools and people never becomes a control token: bodies are encoded without added tokens.
- `opening`, `answers` and `asking` end with everything that the template writes before a generation.
- `reading` never raises. Whatever is no well-formed call is text, or a call with an `error`.

A format without line breaks of its own may have a method `laid_out(ids)` as well: the text with line breaks, for pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.environments import Brief, Call, Result, ToolSpec


class TooLong(ValueError):
    """An opening does not fit the context, or is longer than the format can write; the text says what was found and allowed."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A completion, read. What no range covers is thinking or structure. `text`: what the model says to people, without
    thinking and calls. `final`: the token range of that text where the completion holds no call; None: it holds one, or
    says nothing."""

    calls: tuple[Call, ...] = ()
    text: str = ""
    thinking: str = ""
    final: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a segment. `context`: ids before the last completion. `completion`: the ids that the engine sampled last; they
    lack a stop token if a limit cut them short. `brief`: the brief that the segment began with."""

    context: Sequence[int]
    completion: Sequence[int]
    brief: Brief


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn that is over: what was sampled, and the results it was answered by."""

    completion: tuple[int, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """What an assistant said, in words: the way into a format for conversations that nobody sampled. `calls`: name and arguments
    of each, in order."""

    text: str = ""
    thinking: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


class Unwritable(ValueError):
    """A format cannot write what an assistant said; the text names the field, what was found and what is allowed."""


class Writer(Protocol):
    """A renderer that also writes the assistant's turns (for SFT). `chatml` and `jinja` do."""

    def completion(self, said: Said, brief: Brief) -> list[int]:
        """Return the ids that a model would have sampled for this turn, its stop token last. No text becomes a control token.
        Raises Unwritable."""


class Renderer(Protocol):
    name: str
    vocab_size: int
    context: int  # tokens that a segment may hold

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """A generation ends after any of these."""

    def objection(self, brief: Brief) -> str | None:
        """Return why the brief cannot be written: the field, what was found, what is allowed. None: it can. Never raises."""

    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        """Return the ids that a segment begins with, up to where the model continues. `summary`: ids of a self-summary, which
        are included unchanged. `history`: past turns to include; empty: none. Used after `answers` returned None. Raises
        TooLong; any other error is a defect, and not scored."""

    def reading(self, completion: Sequence[int], context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Reading:
        """Read a completion that followed `context`. Call ids are unique within the segment. `tools`: those of the brief; forms
        of calls that write no types (XML) take them from there. Never raises."""

    def answers(self, tail: Tail, results: Sequence[Result]) -> list[int] | None:
        """Return the ids that close the turn, hold its results and open the next. None: the template would have to rewrite
        what was said, so a new segment must begin with `opening(…, history=…)`."""

    def asking(self, tail: Tail, results: Sequence[Result], text: str) -> list[int] | None:
        """Return the ids as `answers` does, with a user's message behind the results. None as in `answers`, or because the
        template allows no such message there."""

    def kept(self, completion: Sequence[int]) -> tuple[int, ...]:
        """Return the part of a sampled self-summary that the next segment begins with: no thinking, no control ids."""

    def text(self, ids: Sequence[int]) -> str:
        """Return the ids as text for people, control tokens visible."""
