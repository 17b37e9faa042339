"""Guesses what a function wants to be given, from annotations, defaults, names and use, and learns from what works.

A spec describes a kind of value: an atom (`"int"`), or `("list", spec)`, `("dict", key, value)`, `("tuple", spec, …)`,
`("const", values)`. Everything follows from the source and the random generator that is passed in.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from typing import Any

from shared import syntax

Spec = Any  # str | tuple, nested

_SHORT = "a b ab abc foo bar hello x=1 foo_bar FooBar a,b a,b,c"
_PLAIN = (
    "a.b a.b.c 1 12 007 aba level /usr/lib a/b 1.5 -3 abcabc Ab1 foo-bar (a) [b] {} aabb cat TEST 0x1f 1010 110 a:b tEsT "
    "end. #c $x __a__ b.py file.txt k=v a;b 2024-01-31 10:30"
)
_SHORT_WORDS = tuple(_SHORT.split())
_SPACED = ("", "  hi ", "Hello World", "x y z", "a b", "key: v", '"q"', "a\nb", "one, two", "the cat sat")
_WORDS = (*_SHORT_WORDS, *_PLAIN.split(), *_SPACED)
_CHARACTERS = "abcABxyz012 _-.,:/"


def _integer(rng: random.Random, pool: Pool) -> int:
    kind = rng.random()
    if pool.integers and kind < 0.15:
        return rng.choice(pool.integers) + rng.choice((-1, 0, 0, 1))
    return rng.randint(0, 10) if kind < 0.6 else rng.randint(-6, 20) if kind < 0.88 else rng.randint(0, 150)


def _string(rng: random.Random, pool: Pool) -> str:
    kind = rng.random()
    if pool.strings and kind < 0.3:
        literal = rng.choice(pool.strings)
        left, right = rng.choice(_SHORT_WORDS), rng.choice(_SHORT_WORDS)
        return rng.choice((literal, left + literal + right, left + literal, literal + right))
    if kind < 0.8:
        return rng.choice(_WORDS)
    return "".join(rng.choice(_CHARACTERS) for _ in range(rng.randint(1, 7)))


class Pool:
    """The literals of the function itself: what it splits at, compares with, looks up."""

    def __init__(self, source: str) -> None:
        constants = [n.value for n in ast.walk(syntax.parse(source)) if isinstance(n, ast.Constant)]
        self.strings = sorted({c for c in constants if isinstance(c, str) and 0 < len(c) <= 10})
        self.integers = sorted({c for c in constants if type(c) is int and 2 < abs(c) < 10_000})


_ATOMS: dict[str, Callable[[random.Random, Pool], Any]] = {
    "int": _integer,
    "pos": lambda rng, pool: rng.randint(1, 20),
    "float": lambda rng, pool: rng.randint(-8, 40) / 4,
    "str": _string,
    "char": lambda rng, pool: rng.choice("abcxyzAZ019 _-.,/"),
    "bool": lambda rng, pool: rng.random() < 0.5,
    "none": lambda rng, pool: None,
    "bytes": lambda rng, pool: rng.choice((b"ab", b"\x00\x01", b"abc", b"xyz1", b"", b"\x10\xff", b"a,b\n")),
}
_MIXED: tuple[Spec, ...] = (
    "int",
    "pos",
    "str",
    "char",
    "float",
    "bool",
    "none",
    ("list", "int"),
    ("list", "str"),
    ("sorted", "pos"),
    ("dict", "char", "int"),
    ("dict", "str", "str"),
    ("dict", "char", ("list", "char")),
    ("list", ("list", "pos")),
    ("list", ("tuple", "char", "int")),
    ("list", ("tuple", "pos", "pos")),
    ("tuple", "int", "int"),
    ("set", "pos"),
    "bytes",
)


def generate(spec: Spec, rng: random.Random, pool: Pool, depth: int = 0) -> Any:
    if isinstance(spec, str):
        return _ATOMS[spec](rng, pool)
    kind, *rest = spec
    if kind == "const":
        return rng.choice(rest[0])
    if kind == "tuple":
        return tuple(generate(part, rng, pool, depth + 1) for part in rest)
    size = rng.randint(0 if rng.random() < 0.15 else 1, 5 if depth == 0 else 3)
    if kind == "dict":
        return {generate(rest[0], rng, pool, 1): generate(rest[1], rng, pool, depth + 1) for _ in range(min(size, 3))}
    if kind == "square":
        size = rng.randint(1, 3)
        return [[rng.randint(0, 9) for _ in range(size)] for _ in range(size)]
    items = [generate(rest[0], rng, pool, depth + 1) for _ in range(size)]
    return sorted(items) if kind == "sorted" else set(items) if kind == "set" else items


def infer(value: Any) -> Spec:
    """The spec of an example's value."""
    if isinstance(value, list | set | frozenset):
        inner = infer(min(value, key=repr)) if value else "int"  # sets have an order of their own in every process
        return ("set" if isinstance(value, set | frozenset) else "list", inner)
    if isinstance(value, tuple):
        return ("tuple", *(infer(item) for item in value))
    if isinstance(value, dict):
        key = next(iter(value), "a")
        return ("dict", infer(key), infer(value.get(key, 1)))
    names = {bool: "bool", int: "int", float: "float", str: "str", bytes: "bytes"}
    return names.get(type(value), "none")


_NAMED_TYPES = {"int": "int", "str": "str", "float": "float", "bool": "bool", "bytes": "bytes", "None": "none"}
_LISTS = frozenset(["list", "List", "Sequence", "Iterable", "Collection", "Iterator", "MutableSequence", "Container"])
_MAPS = frozenset(["dict", "Dict", "Mapping", "MutableMapping"])
_SETS = frozenset(["set", "Set", "frozenset", "FrozenSet", "AbstractSet"])


def from_annotation(text: str) -> list[Spec]:
    """Specs that an annotation allows; none if it says nothing about plain values."""
    try:
        return _annotated(syntax.expression(text.strip("'\"")))
    except (SyntaxError, ValueError):
        return []


def _annotated(node: ast.expr) -> list[Spec]:
    if isinstance(node, ast.Constant):
        return ["none"] if node.value is None else from_annotation(node.value) if isinstance(node.value, str) else []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _annotated(node.left) + _annotated(node.right)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if name:
        bare: Spec = _NAMED_TYPES.get(name)
        if bare is None:
            bare = ("list", "int") if name in _LISTS else ("dict", "char", "int") if name in _MAPS else None
            bare = ("set", "pos") if name in _SETS else ("tuple", "int", "int") if name in ("tuple", "Tuple") else bare
        return [] if bare is None else [bare]
    if not isinstance(node, ast.Subscript):
        return []
    base = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if base == "Literal":
        values = [part.value for part in parts if isinstance(part, ast.Constant)]
        return [("const", tuple(values))] if values else []
    if base in ("Optional", "Union"):
        inner = [spec for part in parts for spec in _annotated(part)]
        return [*inner, "none"] if base == "Optional" else inner
    each = [(_annotated(part) or ["int"])[0] for part in parts if not _is_ellipsis(part)]
    if base in _LISTS and each:
        return [("list", each[0])]
    if base in _SETS and each:
        return [("set", each[0] if isinstance(each[0], str) else "pos")]
    if base in _MAPS and len(each) == 2:
        return [("dict", each[0] if isinstance(each[0], str) else "char", each[1])]
    if base in ("tuple", "Tuple") and each:
        return [("tuple", *(each * 2 if any(_is_ellipsis(part) for part in parts) else each))]
    return []


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


class Guess:
    """Weights of specs per parameter. `draw` a choice, run it, tell `learn` how it went."""

    def __init__(self, params: list[str], weights: list[dict[Spec, float]]) -> None:
        self.params = params
        self._weights = [w or dict.fromkeys(_MIXED, 1.0) for w in weights]

    def draw(self, rng: random.Random, surprise: float) -> tuple[Spec, ...]:
        """`surprise`: how often a parameter gets just anything."""
        choice: list[Spec] = []
        for weights in self._weights:
            if rng.random() < surprise:
                choice.append(rng.choice(_MIXED))
            else:
                choice.append(rng.choices(list(weights), list(weights.values()))[0])
        return tuple(choice)

    def learn(self, choice: tuple[Spec, ...], worked: bool) -> None:
        for weights, spec in zip(self._weights, choice, strict=True):
            before = weights.get(spec, 0.5)
            weights[spec] = before * 1.5 + 0.5 if worked else before * 0.7
