"""Broken calls: not readable, or refused by the tool as they were written."""

from __future__ import annotations

from shared.contracts.graded import place
from shared.terms import Evidence, Found, Seen


def find(seen: Seen) -> Found:
    """Count the calls that could not be read or executed."""
    broken = [
        Evidence(f"broken {span.tool or 'call'}", span.turn, place(i, span.start, span.end))
        for i, span in seen.calls()
        if not span.ok
    ]
    return Found(float(seen.trajectory.effort.broken_tool_calls), broken)
