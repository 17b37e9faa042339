"""Functions of a module's source, with the text that each takes."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from shared import syntax

Node = ast.FunctionDef | ast.AsyncFunctionDef
_FUTURE_ANNOTATIONS = 0x1000000  # compile flag of `from __future__ import annotations`


@dataclass(frozen=True, slots=True)
class Function:
    """`start`, `end`: its first line, decorators included, and its last one, from 1. `text`: these lines. `holder`: the class
    around it; empty: none. `node`: its syntax tree, with positions of the file."""

    path: str
    qualname: str
    start: int
    end: int
    text: str
    holder: str
    node: Node
    flags: int = 0

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def indented(self) -> bool:
        return self.text[:1] in " \t"

    def alone(self, text: str = "") -> tuple[str, int]:
        """Return source that parses by itself and defines the function at the same indentation, and how many lines above the text
        stand in it. `text`: instead of the function's own."""
        text = text or self.text
        if not self.indented:
            return text, 0
        return (f"class {self.holder}:\n" if self.holder else "if 1:\n") + text, 1

    def parsed(self, text: str = "") -> Node:
        """Return the tree of the text by itself. Raises SyntaxError."""
        source, _ = self.alone(text)
        node = parse(source).body[0]
        found = node.body[0] if isinstance(node, ast.ClassDef | ast.If) else node
        if not isinstance(found, Node):
            raise SyntaxError("no function")
        return found

    def within(self, source: str, text: str) -> str:
        """Return the module's source with another text in the place of the function."""
        lines = source.splitlines(keepends=True)
        return "".join(
            [*lines[: self.start - 1], text if text.endswith("\n") or not text else text + "\n", *lines[self.end :]]
        )


def parse(source: str) -> ast.Module:
    """Raises SyntaxError, ValueError, RecursionError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return syntax.parse(source)


def functions(path: str, source: str) -> list[Function]:
    """Return the functions and methods of a module, in the order of the source, none for source that this Python cannot read.
    Functions inside functions belong to the outer one."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = source.splitlines(keepends=True)
    flags = _FUTURE_ANNOTATIONS if _postponed(tree) else 0
    return [
        Function(path, name, start, end, "".join(lines[start - 1 : end]), holder, node, flags)
        for name, holder, node in _definitions(tree, "", "")
        for start, end in [span(node)]
        if not lines[start - 1][: node.col_offset].strip() and lines[end - 1].count(";") == 0
    ]


def span(node: Node | ast.ClassDef) -> tuple[int, int]:
    """Return the first line, decorators included, and the last one."""
    return min([node.lineno, *(one.lineno for one in node.decorator_list)]), node.end_lineno or node.lineno


def _postponed(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(n.name == "annotations" for n in node.names)
        for node in tree.body
    )


def _definitions(node: ast.AST, prefix: str, holder: str) -> Iterator[tuple[str, str, Node]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Node):
            yield prefix + child.name, holder, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.", child.name)
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _definitions(child, prefix, holder)
