"""Changes to tests in Python, by the positions of their syntax tree."""

from __future__ import annotations

import ast
import math
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shared import syntax

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_EQUALITIES = frozenset({"assertEqual", "assertEquals", "assertListEqual", "assertDictEqual", "assertTupleEqual"})
_OPPOSITES = {
    "assertTrue": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIn": "assertNotIn",
    "assertNotIn": "assertIn",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
    "assertIs": "assertIsNot",
    "assertEqual": "assertNotEqual",
}
_OPERATORS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_RAISES = ("pytest.raises", "self.assertRaises")
_OTHERS = ("BlockingIOError", "ChildProcessError", "InterruptedError", "IsADirectoryError", "ProcessLookupError")
_FAMILY = (
    "Exception",
    "BaseException",
    "OSError",
    "IOError",
    "EnvironmentError",
    *_OTHERS,
)  # may raise one of the others
# Others may run the test's body in a way of their own, such as again after a failure.
_DECORATORS = (
    "pytest.mark.",
    "mock.",
    "patch",
    "unittest.mock.",
    "unittest.skip",
    "skipIf",
    "skipUnless",
    "staticmethod",
)
_UNSAFE_DECORATORS = ("pytest.mark.xfail", "pytest.mark.flaky", "pytest.mark.parametrize.flaky")


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes [start, end) of the file become `text`."""

    start: int
    end: int
    text: str


def altered(text: str, path: Sequence[str], choose: random.Random) -> str | None:
    """Return the file with one change to the test. `path`: its classes and its function. None: there is no such function, or it
    could end in another way than by its statements."""
    parsed = _PARSED.of(text)
    function = _found(parsed.tree, path) if parsed is not None else None
    if parsed is None or function is None or not all(map(_harmless, function.decorator_list)):
        return None
    data, at = parsed.data, parsed.at
    reached = list(_reached(function.body))
    edits = [edit for statement in reached for edit in _constants(statement, at, choose)]
    edits += [edit for statement in reached for edit in _bindings(statement, function, at, data)]
    edits += [edit for statement in reached for edit in _exceptions(statement, at, choose)]
    edits = edits or [edit for statement in reached for edit in _negations(statement, at, data)]
    edit = choose.choice(edits) if edits else _sentinel(function, at, choose)
    if edit is None or not _valid(edit, function, parsed):
        return None
    return (data[: edit.start] + edit.text.encode() + data[edit.end :]).decode()


def _valid(edit: Edit, function: ast.FunctionDef | ast.AsyncFunctionDef, parsed: _Parsed) -> bool:
    """Say whether the changed function is Python. Only its own lines are parsed, since nothing else changes."""
    first = min((function.lineno, *(one.lineno for one in function.decorator_list)))
    start, end = parsed.at.line(first), parsed.at.line((function.end_lineno or first) + 1)
    source = parsed.data[start : edit.start] + edit.text.encode() + parsed.data[edit.end : end]
    try:
        syntax.parse(b"if 1:\n" + source if source[:1] in b" \t" else source)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def _found(tree: ast.Module, path: Sequence[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    body: list[ast.stmt] = tree.body
    for name in path[:-1]:
        classes = [one for one in body if isinstance(one, ast.ClassDef) and one.name == name]
        if len(classes) != 1:
            return None
        body = classes[0].body
    functions = [one for one in body if isinstance(one, _FUNCTIONS) and one.name == path[-1]]
    return functions[0] if len(functions) == 1 else None


def _harmless(decorator: ast.expr) -> bool:
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name.startswith(_DECORATORS) and not name.startswith(_UNSAFE_DECORATORS)


def _reached(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body up to the first that could leave it early without an error."""
    for statement in body:
        if any(isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) for node in ast.walk(statement)):
            return
        yield statement


class _Offsets:
    """Byte offsets of a syntax tree's nodes."""

    def __init__(self, data: bytes) -> None:
        self._starts = [0]
        for line in data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def of(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def line(self, number: int) -> int:
        """Return where a line starts; beyond the last one: where the file ends."""
        return self._starts[min(number, len(self._starts)) - 1]


class _Parsed:
    """A file's syntax tree, bytes and offsets."""

    def __init__(self, text: str) -> None:
        self.tree = syntax.parse(text)
        self.data = text.encode()
        self.at = _Offsets(self.data)


class _Last(threading.local):
    """The files that a thread parsed last: an audit changes many tests of one file, and compares them with the same file of the
    base tree. Each thread has its own, because a tree is written to while changes are tried."""

    def __init__(self) -> None:
        self._found: list[tuple[str, _Parsed | None]] = []

    def of(self, text: str) -> _Parsed | None:
        """Return the parsed file. None: it is not Python."""
        for known, parsed in self._found:
            if known == text:
                return parsed
        try:
            new: _Parsed | None = _Parsed(text)
        except (SyntaxError, ValueError, RecursionError):
            new = None
        self._found = [(text, new), *self._found[:1]]
        return new


_PARSED = _Last()


def _method(statement: ast.stmt) -> tuple[str, ast.Call] | None:
    """Return the name and the call of `self.assertSomething(…)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        return (call.func.attr, call) if call.func.value.id == "self" else None
    return None


def _constants(statement: ast.stmt, at: _Offsets, choose: random.Random) -> Iterator[Edit]:
    """Yield changes of a literal that a value is compared with."""
    for one, other in _sides(statement):
        if _literal(one) is not None and _literal(other) is None:
            for node in ast.walk(one):
                if isinstance(node, ast.Constant) and (edit := _changed(one, node, at, choose)):
                    yield edit


def _sides(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr]]:
    """Return the two sides of a claimed equality, in both orders; none: the statement claims none."""
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
        compare = statement.test
        if len(compare.ops) == 1 and isinstance(compare.ops[0], ast.Eq):
            return [(compare.left, compare.comparators[0]), (compare.comparators[0], compare.left)]
    elif (method := _method(statement)) and method[0] in _EQUALITIES and len(method[1].args) >= 2:
        one, other = method[1].args[:2]
        return [(one, other), (other, one)]
    return []


def _bindings(
    statement: ast.stmt, function: ast.FunctionDef | ast.AsyncFunctionDef, at: _Offsets, data: bytes
) -> Iterator[Edit]:
    """Yield changes of a name that a value is compared with, where the name is bound once and read nowhere else."""
    for one, other in _sides(statement):
        if not isinstance(one, ast.Name) or isinstance(other, ast.Constant):
            continue
        uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == one.id]
        reads = [node for node in uses if isinstance(node.ctx, ast.Load)]
        bound = [
            node
            for node in function.body
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [one.id]
        ]
        if len(reads) != 1 or len(uses) != 1 + len(bound):
            continue
        if len(bound) == 1 and bound[0].lineno < statement.lineno:
            start, end = at.of(bound[0].value)
            yield Edit(start, end, f"(({data[start:end].decode()}), 1)")
        elif not bound and one.id in [argument.arg for argument in function.args.args]:
            place, _ = at.of(statement)
            yield Edit(place, place, f"{one.id} = ({one.id}, 1); ")


def _exceptions(statement: ast.stmt, at: _Offsets, choose: random.Random) -> Iterator[Edit]:
    """Yield another exception in place of one that a block must raise."""
    for item in statement.items if isinstance(statement, ast.With) else ():
        call = item.context_expr
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) in _RAISES and call.args):
            continue
        named = {node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)}
        if named.isdisjoint(_FAMILY):
            start, end = at.of(call.args[0])
            yield Edit(start, end, choose.choice(_OTHERS))


def _literal(node: ast.expr) -> tuple[Any] | None:
    """Return the value of a literal in a tuple. None: it is none, or compares in a way of its own."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _changed(whole: ast.expr, node: ast.Constant, at: _Offsets, choose: random.Random) -> Edit | None:
    """Return the change of one constant within a literal, if the literal then differs from what it was."""
    value = node.value
    if isinstance(value, bool) or value is None:
        new: Any = {True: False, False: True, None: 0}[value]
    elif isinstance(value, (int, float)):
        new = value + choose.choice((1, 2, 3, 5, 10)) + abs(value) * choose.choice((0, 1))
        if isinstance(new, float) and not math.isfinite(new):  # no literal says it
            new = value / 2
    elif isinstance(value, str):
        new = value + choose.choice(("a", "e", "s", "x", "1")) if choose.random() < 0.5 or not value else value[:-1]
    elif isinstance(value, bytes):
        new = value + choose.choice((b"a", b"x", b"1"))
    else:
        return None
    start, end = at.of(node)
    before = _literal(whole)
    node.value, kept = new, node.value
    try:
        after = _literal(whole)
    finally:
        node.value = kept
    if before is None or after is None or before == after or new == value:
        return None
    return Edit(start, end, repr(new))


def _negations(statement: ast.stmt, at: _Offsets, data: bytes) -> Iterator[Edit]:
    """Yield the opposite of what a statement claims."""
    if isinstance(statement, ast.Assert):
        start, end = at.of(statement.test)
        yield Edit(start, end, _opposite(statement.test, at, data))
    elif (method := _method(statement)) and (opposite := _OPPOSITES.get(method[0])):
        start, end = at.of(method[1].func)
        yield Edit(start, end, f"self.{opposite}")


def _opposite(claim: ast.expr, at: _Offsets, data: bytes) -> str:
    """Return the opposite of a condition, as a person would write it: its form tells nobody that it was changed."""

    def text(node: ast.expr) -> str:
        start, end = at.of(node)
        return data[start:end].decode()

    if isinstance(claim, ast.Compare) and len(claim.ops) == 1 and (operator := _OPERATORS.get(type(claim.ops[0]))):
        left, right = claim.left, claim.comparators[0]
        between = data[at.of(left)[1] : at.of(right)[0]]
        if b"(" not in between and b")" not in between:
            return f"{text(left)} {operator} {text(right)}"
    if isinstance(claim, (ast.Call, ast.Name, ast.Attribute)):
        return f"not {text(claim)}"
    return f"not ({text(claim)})"


def _sentinel(function: ast.FunctionDef | ast.AsyncFunctionDef, at: _Offsets, choose: random.Random) -> Edit | None:
    """Return a statement in front of the body that fails."""
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in ast.walk(function)):
        return None
    start, _ = at.of(function.body[0])
    if getattr(function.body[0], "decorator_list", None):
        return None
    number = choose.randrange(2, 90)
    indent = " " * function.body[0].col_offset
    claim = f"assert {number} == {number + choose.randrange(1, 9)}"
    if function.args.args and function.args.args[0].arg == "self":
        claim = f"self.assertEqual({number}, {number + 1})" if choose.random() < 0.5 and _cased(function) else claim
    if function.body[0].lineno == function.lineno:
        return Edit(start, start, f"{claim}; ")
    return Edit(start, start, f"{claim}\n{indent}")


def _cased(function: ast.AST) -> bool:
    """Say whether the test uses methods of unittest's cases."""
    return any(isinstance(node, ast.Attribute) and node.attr.startswith("assert") for node in ast.walk(function))
