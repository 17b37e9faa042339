"""Behaviour terms of the reward: what a term reads, what it answers, and where terms are found.

A term is a pure function `Seen -> Found`. The project's own are modules of `services.reward.terms`, each with one function
`find`. Other packages bring theirs by an entry point of the group `etude.reward_terms`: its name is the term's, its object the
function.

    def find(seen: Seen) -> Found:
        slow = [made for turn in seen.turns for made in turn.calls if made.tool == "sleep"]
        return Found(len(slow), [Evidence("slept", turn=made.turn) for made in slow])

Invariants
- A term knows tools by their effect ("reads", "changes", "reverts", "tests", "runs", "ends"), so it holds in any environment.
- A term sees nothing hidden: the trajectory, the files as they were given, the task's text and the tools. No evidence can name a
  hidden test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.contracts.trajectory import Span, Trajectory
from shared.plugins import Plugins, modules_named

RESERVED = frozenset({"solved", "length"})  # parts of a reward that are no behaviour
# Effects of tools that a problem does not describe, by the names that agents commonly give them.
USUAL_EFFECTS: Mapping[str, str] = {
    "edit": "changes",
    "write": "changes",
    "apply_patch": "changes",
    "undo": "reverts",
    "test": "tests",
    "terminal": "runs",
    "bash": "runs",
    "shell": "runs",
    "submit": "ends",
}


class Unreadable(Exception):
    """A term needs something that this grader does not have, such as the text of the tokens; the message says what. The term is
    quarantined for the attempt, and the others go on."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """`turn`: of the attempt; None: the evidence belongs to no turn. `place`: tokens, as shared.contracts.graded.place writes
    them; the empty string: none."""

    text: str
    turn: int | None = None
    place: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """`amount`: the term's weight is multiplied with it; 0: nothing was found. `evidence`: the first few pieces are kept."""

    amount: float = 0.0
    evidence: Sequence[Evidence] = ()


@dataclass(frozen=True, slots=True)
class Made:
    """A tool call as it was made. `effect`: the empty string where the tool is unknown. `ok`: False: it was broken or refused."""

    turn: int
    tool: str
    effect: str
    arguments: Mapping[str, Any]
    ok: bool
    place: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation and what it was answered. `text`: the words for people, without thinking and calls. `output`: the answer, as
    the model read it, all calls' together; the empty string: no generation followed."""

    number: int
    text: str
    calls: tuple[Made, ...]
    output: str
    thinking: str = ""


@dataclass(frozen=True)
class Seen:
    """One attempt, as terms see it.

    `before`: the files that the attempt changed, as they were given. `effects`: of the tools, by their names. `task`: the text that
    the agent was given. `read`: reads the turns from the tokens; None: no text of this attempt can be read here."""

    trajectory: Trajectory
    before: Mapping[str, str]
    effects: Mapping[str, str] = field(default_factory=dict)
    task: str = ""
    read: Callable[[], Sequence[Turn]] | None = None

    def calls(self) -> Iterator[tuple[int, Span]]:
        """Yield (segment, span) of every tool call, in order."""
        for i, segment in enumerate(self.trajectory.segments):
            for span in segment.spans:
                if span.role == "tool_call" or (span.role == "final" and span.tool):
                    yield i, span

    def effect(self, tool: str) -> str:
        """Return the effect of a tool; the empty string: unknown."""
        return self.effects.get(tool) or ("" if self.effects else USUAL_EFFECTS.get(tool, ""))

    @functools.cached_property
    def turns(self) -> Sequence[Turn]:
        """The attempt as text. Raises Unreadable."""
        if self.read is None:
            raise Unreadable("the text of this attempt's tokens cannot be read here")
        return self.read()

    @functools.cached_property
    def after(self) -> Mapping[str, str]:
        """The text of the files as the attempt left them: of a problem whose files are few, all; of a tree, the changed ones."""
        changed = {path: change.text for path, change in self.trajectory.changes.items() if change.text is not None}
        return self.trajectory.files | changed


Term = Callable[[Seen], Found]


@functools.cache
def plugins() -> Plugins:
    """Return where terms are found. Late, for `shared` imports no service, and only those who ask need the package there."""
    return Plugins("etude.reward_terms", modules_named("services.reward.terms", "find"))


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of the terms that were installed here when this was first asked, without loading any. To look for entry
    points takes milliseconds, and graders ask for every attempt."""
    return tuple(name for name in plugins().names() if name not in RESERVED)


@functools.cache
def load(name: str) -> Term:
    """Return a term. Raises shared.plugins.UnknownName."""
    term: Term = plugins().load(name)
    return term
