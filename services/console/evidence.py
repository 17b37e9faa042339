"""What every term of a reward was given for: what the grader found, with the turn that it points to. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.contracts.graded import Finding, Graded
from shared.contracts.messages import Effort, RolloutScored
from shared.contracts.trajectory import Segment

# shared.contracts.graded.place, and what it says of it.
_PLACED = re.compile(r"segment (\d{1,6}), tokens (\d{1,9})-\d{1,9}: (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Point:
    """One piece of evidence. `turn` is said in the block of the page that begins at `start` of `segment`; -1: it has no place
    there."""

    text: str
    segment: int = -1
    start: int = -1
    turn: int = -1


@dataclass(frozen=True, slots=True)
class Given:
    """`value`: what the term adds to the reward; None: it was found, and has no weight. `points`: what it rests on."""

    term: str
    value: float | None
    points: tuple[Point, ...]


def given(scored: RolloutScored, graded: Graded | None, segments: Sequence[Segment]) -> list[Given]:
    """Every term by name, then findings without a weight, then terms without an answer. `graded`: None where it cannot be read."""
    findings = graded.findings if graded else {}
    rows = []
    for term, value in sorted(scored.terms.items()):
        if term == "solved":
            verdict = scored.verdict
            points: tuple[Point, ...] = (
                Point(f"{verdict.passed} of {verdict.total} tests, hidden ones among them, passed"),
            )
        elif term == "length":
            points = (Point(spent(scored.effort)),)
        elif term in findings:
            points = tuple(_points(findings[term], segments))
        else:
            points = (Point("nothing of it was found" if graded else "what was found cannot be read"),)
        rows.append(Given(term, value, points))
    for term, finding in sorted(findings.items()):
        if term not in scored.terms:
            rows.append(Given(term, None, tuple(_points(finding, segments))))
    for term, reason in sorted(graded.quarantined.items()) if graded else ():
        rows.append(Given(term, None, (Point(f"no answer: {reason}"),)))
    return rows


def _points(finding: Finding, segments: Sequence[Segment]) -> Iterator[Point]:
    yield from (_point(text, segments) for text in finding.evidence)
    if finding.amount > max(1, len(finding.evidence)):
        yield Point(f"{finding.amount:g} in all")


def _point(text: str, segments: Sequence[Segment]) -> Point:
    """A place that is none of this trajectory's stays text."""
    if match := _PLACED.fullmatch(text):
        segment, start = int(match[1]), int(match[2])
        spans = segments[segment].spans if segment < len(segments) else []
        if (span := next((span for span in spans if span.start == start), None)) is not None:
            return Point(match[3], segment, start, span.turn)
    return Point(text)


def spent(effort: Effort) -> str:
    """What the length penalty is computed of (docs/recipe.md, "Reward")."""
    tokens = {
        "thinking": effort.thinking_tokens,
        "tool calls": effort.tool_call_tokens,
        "answers of tools": effort.tool_output_tokens,
        "the final answer": effort.final_tokens,
    }
    parts = [f"{count} in {what}" for what, count in tokens.items() if count]
    calls = f"{effort.tool_calls} calls, {effort.turns} turns"
    return f"tokens: {', '.join(parts) or 'none'}; {calls}"
