"""`search`: pieces of files that are about something, best first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import Toolbox, ToolError, lines_of, numbered, parameters, text_of

HITS = 5
LINES = 12  # shown of one piece


class Tool:
    spec = ToolSpec("search", "Find code by meaning or words.", parameters({"query": "string"}))

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        if box.search is None:
            raise ToolError("there is no index here; use grep")
        parts = []
        for hit in await box.search(arguments["query"], HITS):
            try:
                lines = lines_of(await text_of(box, hit.path))[hit.first - 1 : hit.last]
            except ToolError as error:  # removed since, or no text any more
                parts.append(f"{hit.path}:{hit.first}-{hit.last} ({error})")
                continue
            parts.append(f"{hit.path}:{hit.first}-{hit.last}\n{numbered(lines[:LINES], hit.first)}")
        return "\n".join(parts) or "nothing found"
