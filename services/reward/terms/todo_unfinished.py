"""A to-do list with open items at the end."""

from __future__ import annotations

import re

from shared.terms import Evidence, Found, Seen

NOTE = "todo"  # Trajectory.notes: the to-do list as the agent left it, a Markdown checklist
_OPEN_ITEM = re.compile(r"^\s*[-*]\s*\[ \]\s*(.+)$", re.MULTILINE)


def find(seen: Seen) -> Found:
    """Count the open items on the agent's own to-do list."""
    items = _OPEN_ITEM.findall(seen.trajectory.notes.get(NOTE, ""))
    return Found(float(len(items)), [Evidence(f"left open: {item.strip()[:200]}") for item in items])
