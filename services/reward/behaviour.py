"""Behaviour that people would complain about, found in a trajectory. Pure; weights are the configuration's business.

A finding is an amount (what the weight is multiplied with) and the evidence for it, in words with places, so that the
console can show why an attempt lost points and people can judge the judge.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shared.contracts.graded import Finding, place
from shared.contracts.messages import StopReason
from shared.contracts.trajectory import Segment, Span, Trajectory

MAX_EVIDENCE = 5
TERMINAL = frozenset({"terminal", "bash", "shell"})
EDITING = frozenset({"edit", "undo", "write", "apply_patch"})
TERMINAL_CALLS = 4  # fewer calls are no collapse, only a short attempt
TODO_NOTE = "todo"  # Trajectory.notes: the to-do list as the agent left it, a Markdown checklist

_OPEN_ITEM = re.compile(r"^\s*[-*]\s*\[ \]\s*(.+)$", re.MULTILINE)
_THOUGHT = re.compile(
    r"\b(wait|hmm+|let me|let's see|i think|i need to|i should|maybe|actually|not sure|on second thought)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the terms look at: the trajectory and the files as they were given to the agent."""

    trajectory: Trajectory
    before: Mapping[str, str]

    def calls(self) -> Iterator[tuple[int, Span]]:
        """(segment, span) of every tool call, in order."""
        for i, segment in enumerate(self.trajectory.segments):
            for span in segment.spans:
                if span.role == "tool_call" or (span.role == "final" and span.tool):
                    yield i, span


def broken_tool_call(seen: Seen) -> Finding:
    """Number of calls that could not be read or executed."""
    broken = [
        f"{place(i, span.start, span.end)}: broken {span.tool or 'call'}" for i, span in seen.calls() if not span.ok
    ]
    return Finding(float(seen.trajectory.effort.broken_tool_calls), broken[:MAX_EVIDENCE])


def no_submit(seen: Seen) -> Finding:
    """1 where the attempt was ended instead of ending itself."""
    stop = seen.trajectory.stop
    return Finding() if stop is StopReason.submitted else Finding(1.0, [f"ended by {stop.value}"])


def untested_submit(seen: Seen) -> Finding:
    """1 where the agent submitted without a test after its last change, as far as it submitted that change."""
    if seen.trajectory.stop is not StopReason.submitted:
        return Finding()
    last: tuple[int, Span] | None = None
    segments = seen.trajectory.segments
    for i, span in seen.calls():
        if last is not None and any(not _ends_in_summary(segment) for segment in segments[last[0] : i]):
            last = None  # a fresh retry began with the files as they were given: nothing of that change is submitted
        if span.tool == "test" and span.ok:
            last = None
        elif span.tool in EDITING and span.ok:
            last = (i, span)
    if last is None:
        return Finding()
    return Finding(1.0, [f"{place(last[0], last[1].start, last[1].end)}: changed, then submitted untested"])


def _ends_in_summary(segment: Segment) -> bool:
    """What follows it goes on with the same files. (An empty summary leaves no trace in the next segment.)"""
    return bool(segment.spans) and segment.spans[-1].role == "summary"


def todo_unfinished(seen: Seen) -> Finding:
    """Number of open items on the agent's own to-do list."""
    items = _OPEN_ITEM.findall(seen.trajectory.notes.get(TODO_NOTE, ""))
    return Finding(float(len(items)), [f"left open: {item.strip()[:200]}" for item in items[:MAX_EVIDENCE]])


def terminal_only(seen: Seen) -> Finding:
    """1 where everything was done in the terminal although there are tools for it: nobody can follow such work."""
    tools = [span.tool for _, span in seen.calls() if span.tool != "submit"]
    if len(tools) < TERMINAL_CALLS or not all(tool in TERMINAL for tool in tools):
        return Finding()
    return Finding(1.0, [f"{len(tools)} calls, all of them in the terminal"])


def thoughts_in_comments(seen: Seen) -> Finding:
    """Number of comments added to Python files that think aloud instead of explaining the code."""
    evidence = []
    for path, text in sorted(seen.trajectory.files.items()):
        if not path.endswith(".py"):
            continue
        old = {comment for _, comment in _comments(seen.before.get(path, ""))}
        evidence += [
            f"{path}:{line}: {comment[:200]}"
            for line, comment in _comments(text)
            if comment not in old and _THOUGHT.search(comment)
        ]
    return Finding(float(len(evidence)), evidence[:MAX_EVIDENCE])


def _comments(text: str) -> list[tuple[int, str]]:
    """(line, text) of the comments, as far as the text can be read as Python."""
    found = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found.append((token.start[0], token.string))
    except (tokenize.TokenError, SyntaxError):
        pass
    return found


# Their names stand in shared.contracts.run.BEHAVIOUR, too: who starts a run is told of a wrong one at once.
TERMS: dict[str, Callable[[Seen], Finding]] = {
    term.__name__: term
    for term in (broken_tool_call, no_submit, untested_submit, todo_unfinished, terminal_only, thoughts_in_comments)
}


def findings(trajectory: Trajectory, before: Mapping[str, str]) -> dict[str, Finding]:
    """Every term that found something. All are computed, whatever the weights: a term can be added in mid-run, and the
    drift watch sees those without a weight too."""
    seen = Seen(trajectory, before)
    found = {name: term(seen) for name, term in TERMS.items()}
    return {name: finding for name, finding in found.items() if finding.amount}
