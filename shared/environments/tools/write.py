"""`write`: a whole file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.environments import ToolSpec
from shared.environments.tools import MAX_TEXT, Toolbox, ToolError, lines_of, parameters


class Tool:
    spec = ToolSpec(
        "write",
        "Create or overwrite a file.",
        parameters({"path": "string", "content": "string"}),
        "changes",
    )

    async def run(self, box: Toolbox, arguments: Mapping[str, Any]) -> str:
        path, content = arguments["path"], arguments["content"]
        data = content.encode("utf-8", "surrogatepass")
        if len(data) > MAX_TEXT:
            raise ToolError(f"argument 'content': found {len(data)} bytes; allowed: at most {MAX_TEXT}")
        existed = await box.files.write(box.path(path), data)
        return f"{'overwrote' if existed else 'created'} {path}, {len(lines_of(content))} lines"
