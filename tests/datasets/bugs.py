"""Small bugs of one line, put into a module: for problems as SWE-smith makes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
}
_SIGNS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


def bugs(text: str) -> Iterator[tuple[str, str]]:
    """(what was done, the module with the bug), from the end of the module to its beginning."""
    lines = text.splitlines(keepends=True)
    for node in reversed(list(ast.walk(ast.parse(text)))):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            old, new = _SIGNS[type(node.ops[0])], _COMPARED[type(node.ops[0])]
            start, end = node.left.end_col_offset, node.comparators[0].col_offset
            if node.left.end_lineno == node.comparators[0].lineno and start is not None:
                yield from _replaced(lines, node.lineno, start, end, old, new)
        elif isinstance(node, ast.BoolOp) and node.values[0].end_lineno == node.values[1].lineno:
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _replaced(
                lines, node.values[1].lineno, node.values[0].end_col_offset or 0, node.values[1].col_offset, old, new
            )


def _replaced(lines: list[str], number: int, start: int, end: int, old: str, new: str) -> Iterator[tuple[str, str]]:
    line = lines[number - 1]
    if not line.isascii() or line[start:end].count(old) != 1:
        return
    changed = line[:start] + line[start:end].replace(old, new) + line[end:]
    yield f"{old} became {new} on line {number}", "".join([*lines[: number - 1], changed, *lines[number:]])
