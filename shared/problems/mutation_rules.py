"""What programmers get wrong, as rules on the syntax tree: place → (kind, edits, replacement of the whole statement).

Each rule is a generator over one node type; what is taken for what stands in `confusions`. A rule may propose what turns out
to change nothing; the renderer drops it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shared.problems.confusions import (
    BUILTINS,
    CLEANERS,
    COMPARISONS,
    EXCEPTIONS,
    IDENTITIES,
    INVERSE,
    METHODS,
    OPERATORS,
    ORDERED,
)


@dataclass(frozen=True, slots=True)
class Edit:
    """Sets `holder.field` (or `holder.field[index]`) to `value`."""

    holder: ast.AST
    field: str
    index: int | None
    value: Any


@dataclass(frozen=True, slots=True)
class Place:
    """A node, where it hangs, and the nodes above it within its statement (the statement first)."""

    node: Any
    holder: ast.AST
    field: str
    index: int | None
    above: tuple[ast.AST, ...]

    def put(self, value: Any) -> Edit:
        return Edit(self.holder, self.field, self.index, value)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a confused programmer could reach for: the function's own variables and its strings, sorted. Variables of a
    comprehension are within reach only inside it."""

    names: tuple[str, ...]
    strings: tuple[str, ...]

    @classmethod
    def of(cls, tree: ast.AST) -> Scope:
        names: set[str] = set()
        strings: set[str] = set()
        inner = {id(node) for comprehension in ast.walk(tree) for node in _targets(comprehension)}
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inner:
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= 12:
                strings.add(node.value)
        return cls(tuple(sorted(names)), tuple(sorted(strings)))

    def reachable(self, place: Place) -> list[str]:
        own = {node.id for above in place.above for node in _targets(above)}
        return sorted({*self.names, *own})


def _targets(node: ast.AST) -> list[ast.Name]:
    """The variables that a comprehension binds; none for any other node."""
    generators = getattr(node, "generators", ())
    return [name for item in generators for name in ast.walk(item.target) if isinstance(name, ast.Name)]


Bug = tuple[str, tuple[Edit, ...], "ast.AST | None"]

KINDS = (
    "arguments",
    "arithmetic",
    "augmented",
    "boolean",
    "branches",
    "builtin",
    "comparison",
    "condition",
    "constant",
    "default",
    "dropped_call",
    "dropped_term",
    "exception",
    "flag",
    "index",
    "jump",
    "method",
    "negation",
    "operands",
    "plus_one",
    "range",
    "return",
    "slice",
    "string",
    "target",
    "variable",
)

_ONE = ast.Constant(value=1)


def _plus(node: ast.expr, step: int) -> ast.expr:
    return ast.BinOp(left=node, op=ast.Add() if step > 0 else ast.Sub(), right=_ONE)


def bugs(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    """Everything that could be wrong at this place."""
    for rule in _RULES.get(type(place.node), ()):
        yield from rule(place, statement, scope)


def _compare(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.Compare = place.node
    for index, op in enumerate(node.ops):
        for other in COMPARISONS[type(op)]:
            yield "comparison", (Edit(node, "ops", index, other()),), None
    if len(node.ops) == 1 and type(node.ops[0]) in INVERSE:
        yield "condition", (Edit(node, "ops", 0, INVERSE[type(node.ops[0])]()),), None
        yield "operands", (Edit(node, "left", None, node.comparators[0]), Edit(node, "comparators", 0, node.left)), None


def _binary(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.BinOp = place.node
    if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
        return  # string formatting, not arithmetic
    for other in OPERATORS.get(type(node.op), ()):
        yield "arithmetic", (Edit(node, "op", None, other()),), None
    if isinstance(node.op, ORDERED):
        yield "operands", (Edit(node, "left", None, node.right), Edit(node, "right", None, node.left)), None
    one = isinstance(node.right, ast.Constant) and node.right.value == 1 and isinstance(node.op, ast.Add | ast.Sub)
    yield "plus_one" if one else "dropped_term", (place.put(node.left),), None
    if not one and isinstance(node.op, ast.Add | ast.Mult | ast.BitAnd | ast.BitOr):
        yield "dropped_term", (place.put(node.right),), None


def _boolean(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.BoolOp = place.node
    yield "boolean", (Edit(node, "op", None, ast.Or() if isinstance(node.op, ast.And) else ast.And()),), None
    for index in range(len(node.values)):
        rest = [value for other, value in enumerate(node.values) if other != index]
        yield (
            "dropped_term",
            (place.put(rest[0]) if len(rest) == 1 else place.put(ast.BoolOp(op=node.op, values=rest)),),
            None,
        )


def _unary(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.UnaryOp = place.node
    negative_index = isinstance(place.holder, ast.Subscript) and isinstance(node.op, ast.USub)
    if negative_index and isinstance(node.operand, ast.Constant) and node.operand.value == 1:
        yield "index", (place.put(ast.Constant(value=0)),), None
    elif isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield "negation", (place.put(node.operand),), None


def _tested(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    """If, While, IfExp: the condition inverted, the branches swapped."""
    node = place.node
    if not isinstance(node.test, ast.Compare | ast.UnaryOp | ast.Constant):
        yield "condition", (Edit(node, "test", None, ast.UnaryOp(op=ast.Not(), operand=node.test)),), None
    if isinstance(node, ast.IfExp):
        yield "branches", (Edit(node, "body", None, node.orelse), Edit(node, "orelse", None, node.body)), None
        yield "dropped_term", (place.put(node.body),), None


def _constant(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    value = place.node.value
    default = isinstance(statement, ast.FunctionDef) and any(isinstance(node, ast.arguments) for node in place.above)
    if isinstance(place.holder, ast.JoinedStr | ast.FormattedValue):
        return
    if isinstance(value, bool):
        kind = "default" if default else "return" if isinstance(place.holder, ast.Return) else "flag"
        yield kind, (place.put(ast.Constant(value=not value)),), None
    elif isinstance(value, int | float):
        kind = "default" if default else "index" if isinstance(place.holder, ast.Subscript) else "constant"
        negated = isinstance(place.holder, ast.UnaryOp)
        for other in (value + 1, value - 1, *((value * 10, 1) if value == 0 or abs(value) >= 8 else ())):
            if other >= 0 and other != value and not (negated and other == 0):
                yield kind, (place.put(ast.Constant(value=other)),), None
        if kind == "index" and value == 0:
            yield kind, (place.put(ast.UnaryOp(op=ast.USub(), operand=_ONE)),), None
    elif isinstance(value, str):
        for other in _other_strings(value, scope):
            yield "default" if default else "string", (place.put(ast.Constant(value=other)),), None
    elif value is None and isinstance(place.holder, ast.Return):
        for other in (False, 0, ""):
            yield "return", (place.put(ast.Constant(value=other)),), None


def _other_strings(value: str, scope: Scope) -> Iterator[str]:
    """What the string is easily mistaken for: another of the function's, or itself with a character more or less."""
    if value == "":
        yield " "
    elif value.isspace():
        yield ""
    elif len(value) <= 12:
        yield from (value[:-1], value[1:], value.swapcase())
        if value != value.strip():
            yield value.strip()
    for other in scope.strings:
        if other != value and abs(len(other) - len(value)) <= 2:
            yield other


def _call(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.Call = place.node
    args = node.args
    starred = any(isinstance(arg, ast.Starred) for arg in args)
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if not starred:
        for index in range(len(args) - 1):
            yield (
                "arguments",
                (Edit(node, "args", index, args[index + 1]), Edit(node, "args", index + 1, args[index])),
                None,
            )
        if len(args) >= 2:
            yield "arguments", (Edit(node, "args", None, args[:-1]),), None
    for index in range(len(node.keywords)):
        rest = [keyword for other, keyword in enumerate(node.keywords) if other != index]
        yield "arguments", (Edit(node, "keywords", None, rest),), None
    if isinstance(node.func, ast.Attribute):
        for other in METHODS.get(node.func.attr, ()):
            yield "method", (Edit(node.func, "attr", None, other),), None
        if node.func.attr in CLEANERS:
            yield "dropped_call", (place.put(node.func.value),), None
        return
    for other in BUILTINS.get(name, ()):
        yield "builtin", (Edit(node.func, "id", None, other),), None
    if name in IDENTITIES and len(args) == 1:
        yield "dropped_call", (place.put(args[0]),), None
    if name == "range" and args and not starred:
        stop = min(len(args) - 1, 1)
        for step in (1, -1):
            yield "range", (Edit(node, "args", stop, _plus(args[stop], step)),), None
        if len(args) == 1:
            yield "range", (Edit(node, "args", None, [_ONE, args[0]]),), None
        else:
            yield "range", (Edit(node, "args", None, args[1:]),), None
            yield "range", (Edit(node, "args", 0, _plus(args[0], 1)),), None
    if name == "enumerate" and len(args) == 1:
        yield "range", (Edit(node, "args", None, [args[0], _ONE]),), None


def _slice(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.Slice = place.node
    if (node.lower is None) != (node.upper is None):
        yield "slice", (Edit(node, "lower", None, node.upper), Edit(node, "upper", None, node.lower)), None
    for name in ("lower", "upper"):
        bound = getattr(node, name)
        if bound is None:
            continue
        if node.lower is not None and node.upper is not None:
            yield "slice", (Edit(node, name, None, None),), None
        if not isinstance(bound, ast.Constant):
            for step in (1, -1):
                yield "slice", (Edit(node, name, None, _plus(bound, step)),), None
    if node.step is not None:
        yield "slice", (Edit(node, "step", None, None),), None


def _name(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.Name = place.node
    names = scope.reachable(place)
    if node.id not in names:
        return
    if isinstance(node.ctx, ast.Load):
        kind = "return" if isinstance(place.holder, ast.Return) else "variable"
        if isinstance(place.holder, ast.Subscript) and place.field == "slice":
            for step in (1, -1):
                yield "index", (place.put(_plus(node, step)),), None
    elif isinstance(statement, ast.Assign | ast.AugAssign) and not any(isinstance(a, ast.expr) for a in place.above):
        kind = "target"
    else:
        return
    for other in names:
        if other != node.id:
            yield kind, (Edit(node, "id", None, other),), None


def _tuple(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    items = place.node.elts
    kind = (
        "return"
        if isinstance(place.holder, ast.Return)
        else "target"
        if place.field in ("targets", "target")
        else "operands"
    )
    if len(items) == 2 and not any(isinstance(item, ast.Starred) for item in items):
        yield kind, (Edit(place.node, "elts", 0, items[1]), Edit(place.node, "elts", 1, items[0])), None


def _augmented(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    node: ast.AugAssign = place.node
    for other in OPERATORS.get(type(node.op), ()):
        yield "augmented", (Edit(node, "op", None, other()),), None
    yield "augmented", (), ast.Assign(targets=[node.target], value=node.value, lineno=1)


def _loop(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    """For and comprehensions: the first or the last element forgotten, the filter forgotten."""
    node = place.node
    if isinstance(node.iter, ast.Name):
        for bounds in (ast.Slice(lower=_ONE), ast.Slice(upper=ast.UnaryOp(op=ast.USub(), operand=_ONE))):
            yield (
                "range",
                (Edit(node, "iter", None, ast.Subscript(value=node.iter, slice=bounds, ctx=ast.Load())),),
                None,
            )
    for index, condition in enumerate(getattr(node, "ifs", ())):
        yield "dropped_term", (Edit(node, "ifs", None, [test for test in node.ifs if test is not condition]),), None
        if not isinstance(condition, ast.Compare | ast.UnaryOp):
            yield "condition", (Edit(node, "ifs", index, ast.UnaryOp(op=ast.Not(), operand=condition)),), None


def _jump(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    yield "jump", (), ast.Continue() if isinstance(place.node, ast.Break) else ast.Break()
    yield "jump", (), ast.Pass()


def _except(place: Place, statement: ast.AST, scope: Scope) -> Iterator[Bug]:
    caught = place.node.type
    if isinstance(caught, ast.Name):
        for other in EXCEPTIONS:
            if other != caught.id:
                yield "exception", (Edit(caught, "id", None, other),), None


Rule = Callable[[Place, ast.AST, Scope], Iterator[Bug]]
_RULES: dict[type[ast.AST], tuple[Rule, ...]] = {
    ast.Compare: (_compare,),
    ast.BinOp: (_binary,),
    ast.BoolOp: (_boolean,),
    ast.UnaryOp: (_unary,),
    ast.If: (_tested,),
    ast.While: (_tested,),
    ast.IfExp: (_tested,),
    ast.Constant: (_constant,),
    ast.Call: (_call,),
    ast.Slice: (_slice,),
    ast.Name: (_name,),
    ast.Tuple: (_tuple,),
    ast.AugAssign: (_augmented,),
    ast.For: (_loop,),
    ast.comprehension: (_loop,),
    ast.Break: (_jump,),
    ast.Continue: (_jump,),
    ast.ExceptHandler: (_except,),
}
