"""`todo`: the agent's own list of what is to be done, kept with the trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import Toolbox, ToolError, parameters

NOTE = "todo"  # services.reward.terms.todo_unfinished reads it: a Markdown checklist
MOST = 50  # items


class Tool:
    spec = ToolSpec(
        "todo",
        "Replace your to-do list: open items, done items.",
        parameters(
            {"open": {"type": "array", "items": {"type": "string"}}},
            {"done": {"type": "array", "items": {"type": "string"}}},
        ),
        "notes",
    )

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        items = [("x", item) for item in arguments.get("done", ())] + [(" ", item) for item in arguments["open"]]
        if len(items) > MOST:
            raise ToolError(f"found {len(items)} items; allowed: at most {MOST}")
        box.notes[NOTE] = "\n".join(f"- [{mark}] {' '.join(item.split())[:200]}" for mark, item in items)
        return box.notes[NOTE] or "the list is empty"
