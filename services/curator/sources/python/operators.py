"""Bugs in a function's own text: what stands there changes as little as possible, so that the format does not show the place.

The rules for expressions are those of `shared.problems.mutation_rules`. Added here: a statement is removed, another exception
is raised. A mutant is kept only where its text parses to exactly the tree that the rule meant.
"""

from __future__ import annotations

import ast
import contextlib
import io
import random
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from services.curator.sources.python.functions import Function, Node
from shared.problems.confusions import EXCEPTIONS
from shared.problems.mutation_rules import Edit, Place, Scope, bugs
from shared.problems.mutations import places, swap

_MAX_LINES = 3  # of an expression that is written again as one line
_MAX_WIDTH = 100
# How likely a kind takes its turn, 1 unless named: kinds with very many places, and kinds that tests seldom notice.
_WEIGHTS = {
    **{
        "variable": 0.25,
        "target": 0.15,
        "string": 0.2,
        "constant": 0.6,
        "default": 0.3,
        "exception": 0.7,
        "method": 0.7,
    },
    **{"flag": 0.7, "operands": 0.7},
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """`line`: of the file. `statement`: the first line of the statement there. `text`: of the whole function."""

    function: Function
    kind: str
    line: int
    statement: int
    text: str


@dataclass(frozen=True, slots=True)
class _Site:
    """`write`: makes the change to the tree and gives the new text, or None; `undo` is called in any case."""

    kind: str
    line: int
    statement: int
    write: Callable[[], str | None]


def mutants(function: Function, rng: random.Random) -> Iterator[Mutant]:
    """Yield distinct mutants, kinds in turn. Those on the line of `def` are left out: defaults are made when a module is loaded."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        yield from _Text(function).mutants(rng)


class _Text:
    def __init__(self, function: Function) -> None:
        self._function = function
        source, above = function.alone()
        self._above = above
        self._lines = source.encode().splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._data = source.encode()
        self._node = function.parsed()
        self._original = ast.dump(self._node)
        self._double = function.text.count('"') >= function.text.count("'")

    def mutants(self, rng: random.Random) -> Iterator[Mutant]:
        by_kind: dict[str, list[_Site]] = {}
        for site in self._sites():
            by_kind.setdefault(site.kind, []).append(site)
        for sites in by_kind.values():
            rng.shuffle(sites)
        seen = {self._function.text}
        while by_kind:
            kinds = sorted(by_kind)
            rng.shuffle(kinds)
            for kind in kinds:
                if rng.random() >= _WEIGHTS.get(kind, 1.0):
                    continue
                site = by_kind[kind].pop()
                if not by_kind[kind]:
                    del by_kind[kind]
                text = site.write()
                if text is not None and text not in seen:
                    seen.add(text)
                    shift = self._function.start - 1 - self._above
                    yield Mutant(self._function, kind, site.line + shift, site.statement + shift, text)

    def _sites(self) -> Iterator[_Site]:
        scope = Scope.of(self._node)
        for block in _blocks(self._node):
            for index, statement in enumerate(block):
                yield from self._statement(block, index)
                if isinstance(statement, Node | ast.ClassDef | ast.Import | ast.ImportFrom | ast.Try):
                    continue
                yield from self._expressions(statement, scope)
        for handler in ast.walk(self._node):
            if isinstance(handler, ast.ExceptHandler):
                yield from self._expressions(handler, scope)

    def _expressions(self, statement: Any, scope: Scope) -> Iterator[_Site]:
        for place in places(statement):
            if isinstance(statement, ast.Raise) and isinstance(place.node, ast.Constant | ast.JoinedStr):
                continue  # the text of an error: no test reads it
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue  # a docstring
            if isinstance(place.holder, ast.AnnAssign) and place.field == "annotation":
                continue
            for kind, edits, instead in bugs(place, statement, scope):
                anchor = statement if instead is not None else _anchor(place, edits)
                if anchor is not None:
                    line = getattr(place.node, "lineno", statement.lineno)
                    write = _bound(self._edited, anchor, edits, instead, statement)
                    yield _Site(kind, line, statement.lineno, write)

    def _statement(self, block: list[ast.stmt], index: int) -> Iterator[_Site]:
        statement = block[index]
        if _removable(statement):
            yield _Site("removed", statement.lineno, statement.lineno, _bound(self._removed, block, index))
        raised = statement.exc if isinstance(statement, ast.Raise) else None
        name = raised.func if isinstance(raised, ast.Call) else raised
        if isinstance(name, ast.Name) and name.id in EXCEPTIONS:
            for other in EXCEPTIONS:
                if other != name.id:
                    edit = Edit(name, "id", None, other)
                    write = _bound(self._edited, name, (edit,), None, statement)
                    yield _Site("exception", statement.lineno, statement.lineno, write)

    def _edited(self, anchor: Any, edits: Sequence[Edit], instead: Any, statement: Any) -> str | None:
        """Return the text with the anchor written again after the edits."""
        start, end = self._span(anchor)
        if anchor.end_lineno - anchor.lineno >= _MAX_LINES:
            return None
        if instead is not None and (not isinstance(statement, ast.stmt) or hasattr(statement, "body")):
            return None
        one = edits[0] if len(edits) == 1 else None
        replaced = one is not None and _held(one) is anchor
        if instead is None:
            before = [swap(edit) for edit in edits]
            try:
                new = ast.unparse(one.value if replaced and one else anchor)
                meant = ast.dump(self._node)
            except (ValueError, AttributeError, TypeError, RecursionError):
                return None
            finally:
                for edit, value in zip(reversed(edits), reversed(before), strict=True):
                    swap(Edit(edit.holder, edit.field, edit.index, value))
        else:
            new, meant = ast.unparse(ast.fix_missing_locations(instead)), ""
        if "\n" in new or meant == self._original:
            return None
        new = _quoted(new) if self._double else new
        for written in (new, f"({new})"):
            text = self._with(start, end, written)
            if text is not None and (found := self._dump(text)) is not None and (not meant or found == meant):
                return text if found != self._original else None
        return None

    def _removed(self, block: list[ast.stmt], index: int) -> str | None:
        statement = block[index]
        alone = len([one for one in block if not _is_docstring(one)]) == 1
        first, last = statement.lineno - 1, (statement.end_lineno or statement.lineno) - 1
        start, end = self._span(statement)
        if self._lines[first][: statement.col_offset].strip() or self._data[end : self._starts[last + 1]].strip():
            return None  # another statement stands on the line, or a comment
        block[index : index + 1] = [ast.Pass()] if alone else []
        try:
            meant = ast.dump(self._node)
        finally:
            block[index : index + (1 if alone else 0)] = [statement]
        text = self._with(start, end, "pass") if alone else self._with(self._starts[first], self._starts[last + 1], "")
        return text if text is not None and self._dump(text) == meant else None

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _with(self, start: int, end: int, new: str) -> str | None:
        """Return the function's text with other bytes from `start` to `end`."""
        data = self._data[:start] + new.encode() + self._data[end:]
        line = data[data.rfind(b"\n", 0, start) + 1 : max(data.find(b"\n", start), start)]
        if len(line) > _MAX_WIDTH and new:
            return None
        return data[self._starts[self._above] :].decode()

    def _dump(self, text: str) -> str | None:
        try:
            return ast.dump(self._function.parsed(text))
        except (SyntaxError, ValueError, RecursionError):
            return None


def _bound(call: Callable[..., str | None], *arguments: Any) -> Callable[[], str | None]:
    return lambda: call(*arguments)


def _held(edit: Edit) -> Any:
    """Return what stands where the edit puts something."""
    there = getattr(edit.holder, edit.field)
    return there if edit.index is None or not isinstance(there, list) else there[edit.index]


def _anchor(place: Place, edits: Sequence[Edit]) -> Any:
    """Return the smallest expression that holds all edits. None: there is none."""
    if len(edits) == 1:
        there = _held(edits[0])
        if isinstance(there, ast.expr) and isinstance(edits[0].value, ast.expr):
            return there
    holders = {id(edit.holder) for edit in edits}
    inside = [node for node in (*place.above, place.node) if isinstance(node, ast.expr)]
    for node in reversed(inside):
        if holders <= {id(one) for one in ast.walk(node)}:
            return node
    return None


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for one in ast.walk(node):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(one, name, None)
            if isinstance(block, list) and block and not isinstance(one, ast.ClassDef):
                yield block


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _removable(statement: ast.stmt) -> bool:
    """Say whether the function still has all its names without the statement."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call | ast.Await)
    if isinstance(statement, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets)
    if isinstance(statement, ast.If):
        return not statement.orelse and isinstance(
            statement.body[-1], ast.Raise | ast.Return | ast.Continue | ast.Break
        )
    return isinstance(statement, ast.AugAssign | ast.Delete | ast.Raise)


def _quoted(text: str) -> str:
    """Write strings in double quotes, as most projects do; `ast.unparse` takes single ones."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError, SyntaxError):
        return text
    for token in reversed(tokens):
        inner = token.string
        if token.type == tokenize.STRING and inner[0] == "'" and inner[:3] != "'''" and not {'"', "\\"} & {*inner}:
            start, end = token.start[1], token.end[1]
            text = f'{text[:start]}"{inner[1:-1]}"{text[end:]}'
    return text
