"""What a module offers to a function lifted out of it: pure imports, literal constants, sibling functions."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Standard modules whose functions depend on their arguments alone. `random`, `time`, `os` (but os.path) are not.
PURE = frozenset(
    [
        "base64",
        "binascii",
        "bisect",
        "calendar",
        "cmath",
        "collections",
        "colorsys",
        "copy",
        "datetime",
        "decimal",
        "difflib",
        "fnmatch",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "html",
        "itertools",
        "json",
        "keyword",
        "math",
        "operator",
        "posixpath",
        "re",
        "shlex",
        "statistics",
        "string",
        "struct",
        "textwrap",
        "unicodedata",
        "urllib.parse",
        "zlib",
    ]
)
_PATH = ("basename", "commonprefix", "dirname", "isabs", "join", "normpath", "relpath", "split", "splitext")
# Modules of which only some attributes are pure.
PARTIAL: dict[str, frozenset[str]] = {
    "os": frozenset(["path", "sep", "altsep", "linesep", "extsep"]),
    "datetime": frozenset(["timedelta", "date", "datetime", "time"]),
}
_IMPURE = frozenset(
    ["now", "today", "utcnow", "fromtimestamp", "abspath", "realpath", "exists", "isfile", "isdir", "getcwd"]
)
_MAX_CONSTANT = 72


@dataclass(frozen=True, slots=True)
class Constant:
    text: str
    imports: tuple[str, ...] = ()


@dataclass(slots=True)
class Module:
    """`imports`: name → line that brings it. `outside`: names imported from anywhere else. `partial`: name → what may be
    used of it. `constants`: name → its assignment, a literal or a compiled pattern. `functions`: name → definition."""

    imports: dict[str, str] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    partial: dict[str, frozenset[str]] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.Module) -> Module:
        module = cls()
        assigned: Counter[str] = Counter()
        assignments: list[ast.Assign] = []
        for node in _top_level(tree.body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module._import(alias)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    module._import_from(node, alias)
            elif isinstance(node, ast.FunctionDef):
                if not node.decorator_list:
                    module.functions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                assigned.update(n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))
                if isinstance(node, ast.Assign):
                    assignments.append(node)
        for node in assignments:
            target = node.targets[0]
            if len(node.targets) == 1 and isinstance(target, ast.Name) and assigned[target.id] == 1:
                constant = module._constant(node)
                if constant is not None:
                    module.constants[target.id] = constant
        return module

    def _import(self, alias: ast.alias) -> None:
        bound = alias.asname or alias.name.split(".")[0]
        if alias.name in PURE and (alias.asname or "." not in alias.name):
            self.imports[bound] = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        elif alias.name in ("os", "os.path") and not alias.asname:
            self.imports[bound] = "import os"
        else:
            self.outside.add(bound)
            return
        if alias.name in PARTIAL:
            self.partial[bound] = PARTIAL[alias.name]

    def _import_from(self, node: ast.ImportFrom, alias: ast.alias) -> None:
        bound = alias.asname or alias.name
        source = "os.path" if node.module in ("os.path", "posixpath") else node.module
        pure = source in PURE and alias.name not in ("*", *_IMPURE)
        if node.level == 0 and (pure or (source == "os.path" and alias.name in _PATH)):
            self.imports[bound] = f"from {source} import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
        else:
            self.outside.add(bound)

    def _constant(self, node: ast.Assign) -> Constant | None:
        text = ast.unparse(node)
        if len(text) > _MAX_CONSTANT or "\n" in text:
            return None
        value = node.value
        if (
            isinstance(value, ast.Call)
            and isinstance(value.func, ast.Attribute)
            and isinstance(value.func.value, ast.Name)
            and (value.func.value.id, value.func.attr) == ("re", "compile")
            and self.imports.get("re") == "import re"
        ):
            literal: list[ast.expr] = value.args[:1]
            flags = value.args[1:]
            if all(
                isinstance(n, ast.Attribute | ast.Name | ast.BinOp | ast.BitOr | ast.Load)
                for f in flags
                for n in ast.walk(f)
            ):
                return Constant(text, ("import re",)) if _is_literal(literal) and not value.keywords else None
            return None
        return Constant(text) if _is_literal([value]) else None


def _top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of the module, through if and try."""
    for node in body:
        yield node
        for name in ("body", "orelse", "handlers", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            for child in getattr(node, name, ()):
                yield from _top_level(child.body if isinstance(child, ast.ExceptHandler) else [child])


def _is_literal(nodes: list[ast.expr]) -> bool:
    try:
        for node in nodes:
            ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True
