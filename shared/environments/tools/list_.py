"""`list`: the paths in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import Toolbox, parameters

MOST = 300  # paths in one answer


class Tool:
    spec = ToolSpec(
        "list",
        "List files in a folder.",
        parameters({}, {"path": "string", "depth": {"type": "integer", "minimum": 1, "maximum": 20}}),
    )

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        depth = int(arguments.get("depth", 2))
        found = await box.files.ask("list", path=box.path(arguments.get("path", ".")), depth=depth, most=MOST)
        if not found["paths"]:
            return "the folder is empty"
        more = [f"[{found['more']} more]"] if found["more"] else []
        return "\n".join([*found["paths"], *more])
