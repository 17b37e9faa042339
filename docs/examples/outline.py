"""A tool of one's own: the functions and classes of a Python file, with their lines."""

import ast

from shared import syntax
from shared.environments import ToolSpec
from shared.environments.tools import ToolError, parameters, text_of


class Tool:
    spec = ToolSpec("outline", "List functions and classes of a Python file.", parameters({"path": "string"}))

    async def run(self, box, arguments):
        text = await text_of(box, arguments["path"])
        try:
            tree = syntax.parse(text)
        except (SyntaxError, ValueError) as error:
            raise ToolError(f"{arguments['path']}: not valid Python: {error}") from None
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        return "\n".join(f"{node.lineno}: {node.name}" for node in found) or "nothing is defined"
