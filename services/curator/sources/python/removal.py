"""Takes a function or a class out of a source text: the definition, the imports of its name, and what refers to it in tests."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.curator.sources.python.functions import Node, parse, span

Definition = Node | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Target:
    """`qualname`: e.g. `take`, or `Cache.pop` of a method. `start`, `end`: its lines. `holder`: the class of a method, or None."""

    path: str
    qualname: str
    start: int
    end: int
    text: str
    node: Definition
    holder: ast.ClassDef | None

    @property
    def name(self) -> str:
        return self.node.name


def targets(path: str, source: str) -> list[Target]:
    """Return the public functions, classes and methods of a module that have a docstring, none where it cannot be read."""
    try:
        tree = parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = source.splitlines(keepends=True)
    found = [_target(path, lines, node, holder) for node, holder in _public(tree)]
    return [one for one in found if ast.get_docstring(one.node)]


def _target(path: str, lines: list[str], node: Definition, holder: ast.ClassDef | None) -> Target:
    start, end = span(node)
    name = f"{holder.name}.{node.name}" if holder else node.name
    return Target(path, name, start, end, "".join(lines[start - 1 : end]), node, holder)


def _public(tree: ast.Module) -> Iterator[tuple[Definition, ast.ClassDef | None]]:
    for node in tree.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        yield node, None
        if isinstance(node, ast.ClassDef):
            own = [one for one in node.body if isinstance(one, Node)]
            names = [one.name for one in own]
            for one in own:  # of a property with a setter there are two
                if not one.name.startswith("_") and names.count(one.name) == 1 and len(node.body) > 1:
                    yield one, node


def without_lines(source: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return the text without lines, from 1, both ends included, and without the blank lines that would stand there twice."""
    lines = source.splitlines(keepends=True)
    for start, end in sorted(spans, reverse=True):
        while end < len(lines) and not lines[end].strip() and (start == 1 or not lines[start - 2].strip()):
            end += 1
        del lines[start - 1 : end]
    return "".join(lines)


def without_name(source: str, name: str) -> str:
    """Return a module's text that neither imports the name from elsewhere in the project nor lists it in `__all__`. Raises
    SyntaxError, ValueError."""
    tree, data = parse(source), source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + column

    edits: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
            edits.append((start, end, _imports(node, name)))
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and _is_all(node):
            listed = getattr(node.value, "elts", [])
            for number, one in enumerate(listed):
                if isinstance(one, ast.Constant) and one.value == name:
                    edits.append(_entry(listed, number, at))
    for start, end, text in sorted(edits, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data.decode()


def _imports(node: ast.ImportFrom, name: str) -> str:
    kept = [one for one in node.names if one.name != name]
    if not kept:
        return "pass"
    where = "." * node.level + (node.module or "")
    names = [one.name + (f" as {one.asname}" if one.asname else "") for one in kept]
    line = f"from {where} import {', '.join(names)}"
    if len(line) + node.col_offset <= 79:
        return line
    indent = " " * node.col_offset
    return f"from {where} import (\n" + "".join(f"{indent}    {one},\n" for one in names) + f"{indent})"


def _is_all(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets)


def _entry(listed: list[ast.expr], number: int, at: Callable[[int, int], int]) -> tuple[int, int, str]:
    """Return the bytes of an entry of a list with the comma that belongs to it."""

    def start(one: ast.expr) -> int:
        return at(one.lineno, one.col_offset)

    def end(one: ast.expr) -> int:
        return at(one.end_lineno or one.lineno, one.end_col_offset or 0)

    if number + 1 < len(listed):
        return start(listed[number]), start(listed[number + 1]), ""
    return end(listed[number - 1]) if number else start(listed[number]), end(listed[number]), ""


def refers(node: ast.AST, name: str) -> bool:
    """Say whether code names it: as a variable, an attribute, an import or a text."""
    return any(
        (isinstance(one, ast.Name) and one.id == name)
        or (isinstance(one, ast.Attribute) and one.attr == name)
        or (isinstance(one, ast.alias) and one.name == name)
        or (isinstance(one, ast.Constant) and one.value == name)
        for one in ast.walk(node)
    )


def without_tests(source: str, name: str) -> tuple[str, frozenset[str]]:
    """Return a file of tests without those that refer to the name, and which functions and classes these are, e.g. `test_take` or
    `TakeTests::test_simple`. Raises SyntaxError, ValueError."""
    tree = parse(source)
    gone: set[str] = set()
    spans: list[tuple[int, int]] = []
    for node in tree.body:
        if isinstance(node, Node) and refers(node, name):
            gone.add(node.name)
            spans.append(span(node))
        elif isinstance(node, ast.ClassDef) and refers(node, name):
            inner = [one for one in node.body if isinstance(one, Node) and refers(one, name)]
            rest = [one for one in node.body if one not in inner and not _is_text(one)]
            if not any(isinstance(one, Node) and one.name.startswith("test") for one in rest) or any(
                refers(one, name) for one in rest
            ):
                gone |= {f"{node.name}::{one.name}" for one in node.body if isinstance(one, Node)} | {node.name}
                spans.append(span(node))
            else:
                gone |= {f"{node.name}::{one.name}" for one in inner}
                spans += [span(one) for one in inner]
    return without_name(without_lines(source, spans), name), frozenset(gone)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def head(source: str, node: Definition) -> str:
    """Return the signature with decorators and docstring, of a class those of its public methods as well."""
    lines = source.splitlines()
    start, _ = span(node)
    body = node.body
    documented = _is_text(body[0])
    end = (body[0].end_lineno or body[0].lineno) if documented else body[0].lineno - 1
    if not documented and body[0].lineno == node.lineno:
        end = node.lineno
    shown = lines[start - 1 : end]
    if isinstance(node, ast.ClassDef):
        for one in body:
            if isinstance(one, Node) and (not one.name.startswith("_") or one.name == "__init__"):
                shown += ["", *head(source, one).splitlines()]
    return "\n".join(shown)
