"""What the use of a parameter says about its kind: methods called on it, what it is compared with, its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from services.curator.inputs import Guess, Spec, from_annotation, infer
from shared import syntax

_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"count", "index"}
_LIST_METHODS = frozenset(["append", "extend", "pop", "insert", "sort", "remove", "reverse"])
_DICT_METHODS = frozenset(["items", "keys", "values", "get", "update", "setdefault", "popitem"])
_SET_METHODS = frozenset(["add", "discard", "union", "intersection", "difference", "issubset", "issuperset"])

_INTS, _STRS = ("list", "int"), ("list", "str")
_MAPS: tuple[Spec, ...] = (("dict", "char", "int"), ("dict", "str", "str"), ("dict", "char", ("list", "char")))
_NUMBERS: tuple[Spec, ...] = ("int", "pos")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMERIC_NAMES = _names(
    "n k i j x y num number count size width height a b m index start end limit length step offset level depth total "
    "year month day prec p q"
)
_STRING_NAMES = _names(
    "s text string name line word path key value msg prefix suffix sep url filename label title pattern source message "
    "version token content char c"
)
_LIST_NAMES = _names(
    "lst arr items seq nums array data values iterable sequence collection lines args names tokens parts shape dims sizes "
    "elements rows results indices"
)


def guess(source: str, params: list[str], annotations: dict[str, str], examples: list[list[Any]]) -> Guess:
    tree = syntax.parse(source)
    weights: dict[str, dict[Spec, float]] = {param: {} for param in params}

    def add(param: str, specs: tuple[Spec, ...], weight: float) -> None:
        for spec in specs:
            weights[param][spec] = weights[param].get(spec, 0.0) + weight

    for param in params:
        add(param, tuple(from_annotation(annotations.get(param, ""))), 20.0)
        for names, found in ((_NUMERIC_NAMES, _NUMBERS), (_STRING_NAMES, ("str",)), (_LIST_NAMES, (_INTS, _STRS))):
            if param.lower() in names:
                add(param, found, 2.5)
        if param.startswith(("is_", "has_", "use_", "no_", "allow_", "with_", "include_")):
            add(param, ("bool",), 4.0)
    for example in examples:
        for param, value in zip(params, example, strict=False):
            add(param, (infer(value),), 10.0)
    for node in ast.walk(tree):
        for name, specs, weight in _uses(node):
            if name in weights:
                add(name, specs, weight)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and [a.arg for a in node.args.args] == params:
            for arg, default in zip(reversed(params), reversed(node.args.defaults), strict=False):
                if isinstance(default, ast.Constant):
                    add(arg, (infer(default.value), ("const", (default.value,))), 2.0)
    return Guess(params, [weights[param] for param in params])


Use = tuple[str, tuple[Spec, ...], float]


def _uses(node: ast.AST) -> Iterator[Use]:
    """(parameter, specs, weight) for what one node tells."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name, method = node.value.id, node.attr
        if method in _LIST_METHODS:
            yield name, (_INTS, _STRS), 5.0
        elif method in _DICT_METHODS:
            yield name, _MAPS, 4.0
        elif method in _SET_METHODS:
            yield name, (("set", "pos"),), 4.0
        elif method in _STR_METHODS:
            yield name, ("str",), 6.0
    elif isinstance(node, ast.BinOp):
        yield from _arithmetic(node)
    elif isinstance(node, ast.Compare):
        yield from _comparison(node)
    elif isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Name):
        pairs = (("list", ("tuple", "char", "int")), ("list", ("tuple", "pos", "pos")))
        yield (
            (node.iter.id, pairs, 4.0)
            if isinstance(node.target, ast.Tuple)
            else (node.iter.id, (_INTS, "str", _STRS), 3.0)
        )
    elif isinstance(node, ast.Subscript):
        if isinstance(node.value, ast.Name):
            yield node.value.id, (_INTS, "str", ("dict", "char", "int"), _STRS, ("list", ("list", "pos"))), 2.0
        elif isinstance(node.value, ast.Subscript) and isinstance(node.value.value, ast.Name):
            yield node.value.value.id, (("list", ("list", "pos")), ("square",)), 6.0
        if isinstance(node.slice, ast.Name):
            yield node.slice.id, ("int", "pos", "str"), 1.5
        elif isinstance(node.slice, ast.Slice):
            for bound in (node.slice.lower, node.slice.upper, node.slice.step):
                if isinstance(bound, ast.Name):
                    yield bound.id, _NUMBERS, 4.0
    elif isinstance(node, ast.Call):
        yield from _call(node)
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, ast.Name):
        yield node.test.id, ("bool", "str", "int"), 1.0
    elif isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Name):
        yield node.operand.id, ("bool", _INTS) if isinstance(node.op, ast.Not) else _NUMBERS, 1.5
    elif isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Name):
        yield node.value.id, ("int", "str"), 1.0


def _arithmetic(node: ast.BinOp) -> Iterator[Use]:
    for side, other in ((node.left, node.right), (node.right, node.left)):
        if isinstance(side, ast.Name):
            if isinstance(other, ast.Constant) and isinstance(other.value, str):
                yield side.id, ("str",), 4.0
            elif isinstance(node.op, ast.Add):
                yield side.id, ("int", "str", _INTS), 1.0
            else:
                yield side.id, _NUMBERS, 3.0


def _comparison(node: ast.Compare) -> Iterator[Use]:
    right = node.comparators[0]
    for side, other in ((node.left, right), (right, node.left)):
        if not isinstance(side, ast.Name):
            continue
        if isinstance(other, ast.Constant):
            value = other.value
            if isinstance(value, str):
                yield side.id, ("str", ("const", (value,))), 3.0
            elif isinstance(value, bool):
                yield side.id, ("bool",), 3.0
            elif isinstance(value, int | float):
                yield side.id, _NUMBERS, 3.0
            elif value is None:
                yield side.id, ("none", "str", "int"), 1.0
        elif isinstance(other, ast.Tuple | ast.List | ast.Set) and isinstance(node.ops[0], ast.In | ast.NotIn):
            values = tuple(item.value for item in other.elts if isinstance(item, ast.Constant))
            if values and side is node.left:
                yield side.id, (("const", values), infer(values[0])), 3.0
        elif isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            yield side.id, _NUMBERS, 2.0
    if isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(right, ast.Name):
        yield right.id, ("str", _STRS, _INTS, ("dict", "char", "int")), 1.0


_CALLED: dict[str, tuple[tuple[Spec, ...], float]] = {
    **dict.fromkeys(["range", "chr", "bin", "hex", "abs", "float", "round", "divmod", "pow"], (_NUMBERS, 5.0)),
    **dict.fromkeys(["sum", "max", "min", "sorted"], ((_INTS, ("sorted", "pos")), 4.0)),
    **dict.fromkeys(
        ["len", "enumerate", "list", "tuple", "set", "reversed", "zip", "iter"], ((_INTS, "str", _STRS), 3.0)
    ),
    **dict.fromkeys(["any", "all"], ((("list", "bool"), _INTS), 4.0)),
    **dict.fromkeys(["int", "str", "repr"], (("int", "str"), 2.0)),
    "ord": (("char",), 5.0),
    "dict": (_MAPS, 3.0),
}
_TESTED = {
    "str": "str",
    "int": "int",
    "list": _INTS,
    "tuple": ("tuple", "int", "int"),
    "dict": _MAPS[0],
    "float": "float",
}


def _call(node: ast.Call) -> Iterator[Use]:
    names = [arg.id for arg in node.args if isinstance(arg, ast.Name)]
    if isinstance(node.func, ast.Name):
        if node.func.id in _CALLED:
            specs, weight = _CALLED[node.func.id]
            for name in names:
                yield name, specs, weight
        elif node.func.id == "isinstance" and names and len(node.args) == 2:
            kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            specs = tuple(_TESTED[kind.id] for kind in kinds if isinstance(kind, ast.Name) and kind.id in _TESTED)
            yield names[0], (*specs, "int"), 2.5
    elif isinstance(node.func, ast.Attribute):
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        for name in names:
            if owner == "math":
                yield name, _NUMBERS, 4.0
            elif owner in ("re", "path", "string", "textwrap", "shlex"):
                yield name, ("str",), 4.0
            elif node.func.attr in _STR_METHODS:
                yield name, ("char", "str", _STRS), 2.0
