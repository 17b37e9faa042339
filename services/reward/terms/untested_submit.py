"""A last change that was submitted without a test after it."""

from __future__ import annotations

from shared.contracts.graded import place
from shared.contracts.messages import StopReason
from shared.contracts.trajectory import Segment, Span
from shared.terms import Evidence, Found, Seen


def find(seen: Seen) -> Found:
    """Return 1 where the agent submitted a change that it did not test. Where a problem has no tool that tests, commands count as
    tests: nobody can know what they ran."""
    if seen.trajectory.stop is not StopReason.submitted:
        return Found()
    offered = set(seen.effects.values())
    testing = {"tests"} if "tests" in offered or not offered else {"tests", "runs"}
    last: tuple[int, Span] | None = None
    segments = seen.trajectory.segments
    for i, span in seen.calls():
        if last is not None and any(not _ends_in_summary(segment) for segment in segments[last[0] : i]):
            last = None  # a fresh retry began with the files as they were given: nothing of that change is submitted
        effect = seen.effect(span.tool)
        if effect in testing and span.ok:
            last = None
        elif effect in ("changes", "reverts") and span.ok:
            last = (i, span)
    if last is None:
        return Found()
    i, span = last
    return Found(1.0, [Evidence("changed, then submitted untested", span.turn, place(i, span.start, span.end))])


def _ends_in_summary(segment: Segment) -> bool:
    """Whether the next segment goes on with the same files. (An empty summary leaves no trace in the next segment.)"""
    return bool(segment.spans) and segment.spans[-1].role == "summary"
