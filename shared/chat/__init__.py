"""Conversations as clients write them, in the house's own types.

`openai` and `anthropic` read a request of their API into an `Asked` and write an `Answered` in their API's form. `refusing` and
`openai.fields` say what is refused by name. `reader` turns sampled ids into text and finds stop sequences. `writing` writes an
assistant's turn that was not sampled here. All of it is pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.environments import ToolSpec

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "stop_sequence", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Called:
    """A tool call of an assistant's turn. `written`: its arguments as JSON text, as the model or the client wrote them."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    written: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `answers`: of role `tool`, the id of the call that it answers; empty for any other role."""

    role: Role
    text: str = ""
    thinking: str = ""
    calls: tuple[Called, ...] = ()
    answers: str = ""

    @property
    def identity(self) -> str:
        """Return what makes two messages the same for a model. Thinking, ids and the spelling of JSON may differ: clients drop or
        rewrite them when they send a message back."""
        calls = [[call.name, call.arguments] for call in self.calls]
        text = self.text.strip() if self.role == "assistant" else self.text
        return json.dumps([self.role, text, calls], sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for one answer. `tools`: those that are offered. `most`: tokens at most; None: what there is room for.
    `temperature`: None: the run's. `ids`: the client wants token ids with the answer. `usage`: a stream ends with the usage."""

    turns: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...] = ()
    model: str = "etude"
    most: int | None = None
    stops: tuple[str, ...] = ()
    temperature: float | None = None
    stream: bool = False
    ids: bool = False
    logprobs: bool = False
    usage: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer. `prompt`: the ids that it follows. `tokens`: the sampled ids as they are recorded, with the ones that ended it.
    `logprobs`: one for each of them, with `spellings`, their text. `stop`: the stop sequence that was found."""

    id: str
    model: str
    text: str
    thinking: str
    calls: tuple[Called, ...]
    finish: Finish
    prompt: Sequence[int]
    tokens: Sequence[int]
    created: int  # seconds since the epoch
    logprobs: Sequence[float] = ()
    spellings: Sequence[str] = ()
    cached: int = 0
    stop: str | None = None
    ids: bool = False

    @property
    def turn(self) -> Turn:
        """Return the message that clients send back."""
        return Turn("assistant", self.text, self.thinking, self.calls)
