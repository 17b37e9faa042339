"""Chat formats: how a problem, an action and an observation are written in tokens, and read back.

A format is pure. The agent loop (services/rollout) knows only this Protocol; so does the data pipeline of SFT.
`compact` is the format of the small base policy; real models use theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from shared.problems import Problem


class Tool(StrEnum):
    edit = "edit"
    undo = "undo"
    test = "test"
    submit = "submit"
    summary = "summary"


@dataclass(frozen=True, slots=True)
class Action:
    """One tool call, read from sampled tokens [start, end) of a completion. `error`: why it is broken, else empty."""

    tool: Tool
    start: int
    end: int
    line: int = 0  # edit: zero-based line of the file
    old: str = ""  # edit: text to replace, its first occurrence in the line
    new: str = ""
    text: str = ""  # summary
    error: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a tool answered. `failing`: index of the first failing visible test, None if all pass."""

    tool: Tool
    failing: int | None = None
    got: str = ""
    error: str = ""


class Format(Protocol):
    name: str
    vocab_size: int
    context: int  # tokens a segment may hold

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """A generation ends after any of these."""

    def prompt(self, problem: Problem, files: dict[str, str], summary: tuple[int, ...] = ()) -> list[int]:
        """The task as tokens, with the present state of the files. `summary`: ids of a self-summary, as they were."""

    def objection(self, problem: Problem) -> str:
        """Why no attempt at the problem can be made: the field, what was found, what is allowed. Empty: it can. Never
        raises."""

    def actions(self, completion: list[int]) -> list[Action]:
        """The calls in one generation, in order; a broken one is the last. Never raises."""

    def observation(self, observation: Observation) -> list[int]: ...

    def summary_request(self) -> list[int]: ...

    def text(self, tokens: list[int]) -> str:
        """For people: special tokens visible."""
