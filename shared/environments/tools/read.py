"""`read`: a text file, or a range of its lines, with line numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import Toolbox, ToolError, lines_of, numbered, parameters, text_of

LINES = 400  # shown where the call names no end


class Tool:
    spec = ToolSpec(
        "read",
        "Read a text file with line numbers.",
        parameters(
            {"path": "string"}, {"start": {"type": "integer", "minimum": 1}, "end": {"type": "integer", "minimum": 1}}
        ),
    )

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        path = arguments["path"]
        lines = lines_of(await text_of(box, path))
        first = int(arguments.get("start", 1))
        last = min(int(arguments.get("end", first + LINES - 1)), len(lines))
        if not lines:
            return f"{path} is empty"
        if first > len(lines):
            raise ToolError(f"argument 'start': found {first}; allowed: 1 to {len(lines)}, the lines of {path}")
        if last < first:
            raise ToolError(f"argument 'end': found {last}; allowed: at least 'start', {first}")
        more = f"\n[lines {first}-{last} of {len(lines)}]" if (first, last) != (1, len(lines)) else ""
        return numbered(lines[first - 1 : last], first) + more
