"""`grep`: lines that match a regular expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import Toolbox, parameters

MOST = 100  # lines in one answer
MAX_MORE = 10_000  # matches that are counted beyond them


class Tool:
    spec = ToolSpec(
        "grep",
        "Search files for a regular expression.",
        parameters({"pattern": "string"}, {"path": "string", "glob": "string", "ignore_case": "boolean"}),
    )

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        found = await box.files.ask(
            "grep",
            pattern=arguments["pattern"],
            path=box.path(arguments.get("path", ".")),
            glob=arguments.get("glob", ""),
            ignore_case=arguments.get("ignore_case", False),
            most=MOST,
        )
        if not found["matches"]:
            return "no matches"
        lines = [f"{box.shown(path)}:{number}:{text}" for path, number, text in found["matches"]]
        more = found["more"]
        counted = f"more than {more}" if more == MAX_MORE else more
        return "\n".join([*lines, *([f"[{counted} more matches]"] if more else [])])
