"""From a function somewhere in a module to a file that stands alone.

A lifted function is one file of at most 15 lines: imports of pure standard modules, constants and small helpers of its
module that it needs, and the function itself. `self.x`, `node.x` of a parameter used for nothing else, and free names
become parameters; decorators, docstrings and annotations go (the annotations and examples are kept as hints for the
inputs). What cannot stand alone is refused with a reason; its text still serves pretraining.
"""

from __future__ import annotations

import ast
import builtins
import keyword
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from services.curator.module import Module
from shared import syntax

MAX_LINES = 15
MAX_CHARS = 600
MAX_LINE = 88
MAX_PARAMS = 5
_MAX_NODES = 320  # with annotations; 600 characters hold about 250

# Builtins that reach outside, depend on the process or defeat isolation.
_BANNED = frozenset(
    [
        "open exec eval compile __import__ globals locals vars input print setattr delattr exit quit breakpoint id hash",
        "memoryview help super object dir classmethod staticmethod property NotImplemented copyright credits license",
        "__build_class__ __name__ __file__ __doc__ __debug__ __loader__ __spec__ __package__",
    ]
)
_BANNED_NAMES = frozenset(name for line in _BANNED for name in line.split())
_BUILTINS = frozenset(dir(builtins)) - _BANNED_NAMES
# Methods of plain values: a parameter on which one is called is a value, not an object to take apart.
_VALUE_METHODS = frozenset(
    name for kind in (str, bytes, list, dict, set, tuple, int, float) for name in dir(kind) if not name.startswith("_")
)
_IN_PLACE = frozenset(
    ["add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "reverse", "sort", "update"]
)
_FORBIDDEN = (
    ast.Global,
    ast.Nonlocal,
    ast.ClassDef,
    ast.AsyncFunctionDef,
    ast.Await,
    ast.With,
    ast.AsyncFor,
    ast.AsyncWith,
    ast.Match,
    ast.YieldFrom,
)


# What a line can get wrong; a function with less of it passes its arguments on, and its mutants are all alike.
_WORK = (
    ast.BinOp,
    ast.BoolOp,
    ast.UnaryOp,
    ast.Compare,
    ast.Call,
    ast.Subscript,
    ast.IfExp,
    ast.If,
    ast.For,
    ast.While,
    ast.comprehension,
    ast.AugAssign,
    ast.Try,
)
_MIN_WORK = 3


class Refused(Exception):
    """The function cannot stand alone; the text says why, in one word or two."""


@dataclass(slots=True)
class Lifted:
    """`source`: the file. `hints`: parameter → annotation as written. `examples`: argument lists found in the docstring."""

    source: str
    entry: str
    params: list[str]
    required: int  # parameters without a default, counted from the left
    hints: dict[str, str] = field(default_factory=dict)
    examples: list[list[object]] = field(default_factory=list)


def nodes(tree: ast.AST) -> list[Any]:
    """All nodes, breadth first, as ast.walk has them but without the contexts of names: twice as fast."""
    found = [tree]
    for node in found:
        for name in node._fields:
            value = getattr(node, name, None)
            if value.__class__ is list:
                found.extend(item for item in value if isinstance(item, ast.AST))
            elif isinstance(value, ast.AST) and name != "ctx":
                found.append(value)
    return found


def plain(node: Any) -> Any:
    """A copy without decorators, docstrings and annotations: what pretraining reads."""
    kind = type(node)
    if kind is ast.AnnAssign:
        node = ast.copy_location(ast.Assign(targets=[node.target], value=node.value, type_comment=None), node)
        kind = ast.Assign
    new = kind()
    for name, value in node.__dict__.items():
        if name in _DROPPED:
            value = [] if name in ("decorator_list", "type_params") else None
        elif value.__class__ is list:
            value = [plain(item) if isinstance(item, ast.AST) else item for item in value if not _is_dropped(item)]
            if name == "body" and not value:
                value = [ast.Pass()]
        elif name != "ctx" and isinstance(value, ast.AST):
            value = plain(value)
        setattr(new, name, value)
    return new


_DROPPED = frozenset(["decorator_list", "returns", "annotation", "type_comment", "type_params"])


def _is_dropped(item: Any) -> bool:
    """Docstrings, stray literals, declarations without a value."""
    if item.__class__ is ast.Expr:
        return isinstance(item.value, ast.Constant)
    return item.__class__ is ast.AnnAssign and item.value is None


def lift(function: ast.FunctionDef, module: Module) -> Lifted:
    """Raises Refused."""
    _refuse_statements(function)
    node = plain(function)
    params = _flatten_parameters(node)
    node = _take_objects_apart(node, params)
    preamble = _resolve_free_names(node, module, depth=0)
    params = [arg.arg for arg in node.args.args]
    if not 1 <= len(params) <= MAX_PARAMS:
        raise Refused(f"{len(params)} parameters")
    called = {n.func.id for n in nodes(node) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    if called & set(params):
        raise Refused("calls a parameter")
    everything = nodes(node)
    if not any(_has_effect(n) for n in everything):
        raise Refused("returns nothing")
    if sum(isinstance(n, _WORK) for n in everything) < _MIN_WORK:
        raise Refused("too simple to get wrong")
    source = "\n".join([*preamble, ast.unparse(node)])
    lines = source.split("\n")
    if len(lines) > MAX_LINES or len(source) > MAX_CHARS or max(map(len, lines)) > MAX_LINE or not source.isascii():
        raise Refused("size")
    required = len(params) - len(node.args.defaults)
    own = [arg.arg for arg in function.args.args if arg.arg in params]
    examples = _examples(function) if own == params else []
    return Lifted(source, node.name, params, required, _annotations(function), examples)


def _has_effect(node: ast.AST) -> bool:
    """Returns or yields a value, or may change an argument in place."""
    if isinstance(node, ast.Return | ast.Yield):
        return node.value is not None
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Store | ast.Del)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _IN_PLACE


def _refuse_statements(node: ast.FunctionDef) -> None:
    everything = nodes(node)
    if len(everything) > _MAX_NODES:
        raise Refused("size")
    for n in everything:
        if isinstance(n, _FORBIDDEN):
            raise Refused(type(n).__name__)
        if isinstance(n, ast.Import | ast.ImportFrom):
            raise Refused("import")
        if isinstance(n, ast.Attribute) and n.attr.startswith("__"):
            raise Refused("dunder")


def _flatten_parameters(node: ast.FunctionDef) -> list[str]:
    """Keyword-only, positional-only, * and ** parameters become ordinary ones; odd defaults go."""
    a = node.args
    plain_args = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(plain_args) - len(a.defaults)) + list(a.defaults)
    used = {n.id for n in nodes(node) if isinstance(n, ast.Name)}
    extra = [arg for arg in (a.vararg, a.kwarg) if arg is not None and arg.arg in used]
    everything = [*plain_args, *a.kwonlyargs, *extra]
    defaults += [*a.kw_defaults, *([None] * len(extra))]
    ordered = sorted(zip(everything, defaults, strict=True), key=lambda pair: pair[1] is not None)
    kept = [
        (arg, d if d is None or isinstance(d, ast.Constant | ast.UnaryOp | ast.Tuple) else None) for arg, d in ordered
    ]
    last_bare = max((index for index, (_, d) in enumerate(kept) if d is None), default=-1)
    node.args = ast.arguments(
        posonlyargs=[],
        args=[arg for arg, _ in kept],
        vararg=None,
        kwonlyargs=[],
        kw_defaults=[],
        kwarg=None,
        defaults=[d for index, (_, d) in enumerate(kept) if index > last_bare and d is not None],
    )
    return [arg.arg for arg in node.args.args]


def _bound(node: ast.AST) -> set[str]:
    names: set[str] = set()
    for n in nodes(node):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store | ast.Del):
            names.add(n.id)
        elif isinstance(n, ast.arg):
            names.add(n.arg)
        elif isinstance(n, ast.ExceptHandler | ast.FunctionDef) and n is not node and n.name:
            names.add(n.name)
    return names


def _take_objects_apart(node: ast.FunctionDef, params: list[str]) -> ast.FunctionDef:
    """`self` and every parameter that is used only by its attributes: `p.x` becomes the parameter `x`."""
    everything = nodes(node)
    uses = Counter(n.id for n in everything if isinstance(n, ast.Name))
    fields_of: dict[str, list[ast.Attribute]] = {}
    called: dict[str, set[str]] = {}
    for n in everything:
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name):
            fields_of.setdefault(n.value.id, []).append(n)
        elif isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and isinstance(n.func.value, ast.Name):
            called.setdefault(n.func.value.id, set()).add(n.func.attr)
    for position, name in enumerate(params):
        attributes, methods = fields_of.get(name, []), called.get(name, set())
        only_attributes = uses[name] == len(attributes)
        me = position == 0 and name in ("self", "cls", "mcs")
        if me and not uses[name]:
            _replace_parameter(node, name, [])
            continue
        if not me and (not only_attributes or not attributes or methods & _VALUE_METHODS):
            continue
        if not only_attributes or methods:
            raise Refused(f"needs {name} itself")
        taken = _bound(node) | _BUILTINS
        fields: dict[str, str] = {}
        for attribute in sorted(attributes, key=lambda n: (n.lineno, n.col_offset)):
            if attribute.attr not in fields:
                fields[attribute.attr] = _fresh(attribute.attr.strip("_") or name, name, taken)
                taken.add(fields[attribute.attr])
        node = _Fields(name, fields).visit(node)
        _replace_parameter(node, name, list(fields.values()))
    return node


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _fresh(wanted: str, owner: str, taken: set[str]) -> str:
    for candidate in (wanted, f"{owner.strip('_')}_{wanted}", f"{wanted}_"):
        if candidate not in taken and candidate.isidentifier() and not keyword.iskeyword(candidate):
            return candidate
    raise Refused("names collide")


class _Fields(ast.NodeTransformer):
    def __init__(self, name: str, fields: dict[str, str]) -> None:
        self._name, self._fields = name, fields

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not _is_name(node.value, self._name):
            return node
        return ast.copy_location(ast.Name(id=self._fields[node.attr], ctx=node.ctx), node)


def _replace_parameter(node: ast.FunctionDef, name: str, names: list[str]) -> None:
    args = node.args.args
    position = next(index for index, arg in enumerate(args) if arg.arg == name)
    default = position - (len(args) - len(node.args.defaults))
    if default >= 0:  # an object with a default: all before keep theirs, this one and its fields have none
        node.args.defaults = node.args.defaults[default + 1 :]
    args[position : position + 1] = [ast.arg(arg=new, annotation=None, type_comment=None) for new in names]
    node.args.defaults = node.args.defaults[-len(args) :] if args else []


class _Errors(ast.NodeTransformer):
    """Exception classes of the module become ValueError."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.copy_location(ast.Name(id="ValueError", ctx=node.ctx), node) if node.id in self._names else node


def _resolve_free_names(node: ast.FunctionDef, module: Module, depth: int) -> list[str]:
    """Lines that must stand before the function; free values become leading parameters of `node`. Raises Refused."""
    bound, everything = _bound(node), nodes(node)
    loads = [n for n in everything if isinstance(n, ast.Name) and n.id not in bound and n.id != node.name]
    called = {n.func.id for n in everything if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    imports: list[str] = []
    context: list[str] = []
    new: list[str] = []
    errors: set[str] = set()
    for name in dict.fromkeys(n.id for n in sorted(loads, key=lambda n: (n.lineno, n.col_offset))):
        if name in _BANNED_NAMES:
            raise Refused("banned builtin")
        if name in module.imports:
            imports.append(module.imports[name])
        elif name in module.outside:
            raise Refused("import from elsewhere")
        elif name in module.constants:
            context.append(module.constants[name].text)
            for needed in module.constants[name].imports:
                imports.append(needed)
        elif name in module.functions:
            if depth >= 2:
                raise Refused("helpers of helpers")
            helper = plain(module.functions[name])
            _refuse_statements(helper)
            before = _resolve_free_names(helper, module, depth + 1)
            imports += [line for line in before if line.startswith(("import ", "from "))]
            context += [line for line in before if not line.startswith(("import ", "from "))]
            context += ast.unparse(helper).split("\n")
        elif name in _BUILTINS:
            continue
        elif name.endswith(("Error", "Exception")) and name[0].isupper():
            errors.add(name)
        elif name in called or (name[:1].isupper() and not name.isupper()) or name.startswith("__") or depth:
            raise Refused("free name")
        else:
            new.append(name)
    if len(context) + len(imports) > MAX_LINES:
        raise Refused("size")
    if errors:
        _Errors(errors).visit(node)
    node.args.args[:0] = [ast.arg(arg=name, annotation=None, type_comment=None) for name in new]
    _refuse_impure_attributes(node, module)
    return list(dict.fromkeys(imports)) + _unique_blocks(context)


def _unique_blocks(lines: list[str]) -> list[str]:
    """Drops a constant or helper that was asked for twice; a block starts at a line without indentation."""
    blocks: list[list[str]] = []
    for line in lines:
        if line.startswith(" "):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    return [line for block in dict.fromkeys(tuple(block) for block in blocks) for line in block]


def _refuse_impure_attributes(node: ast.FunctionDef, module: Module) -> None:
    """Of a module like `os` only `os.path` and constants are pure."""
    for n in nodes(node):
        owner = n.value.id if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) else ""
        if owner in module.partial and n.attr not in module.partial[owner]:
            raise Refused("impure import")


def _annotations(function: ast.FunctionDef) -> dict[str, str]:
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs]
    return {arg.arg: ast.unparse(arg.annotation) for arg in every if arg.annotation is not None}


def _examples(function: ast.FunctionDef) -> list[list[object]]:
    """Arguments of `>>> name(literal, …)` in the docstring: the author's own inputs."""
    doc = ast.get_docstring(function, clean=False)
    if not doc or ">>>" not in doc:
        return []
    found: list[list[object]] = []
    for line in doc.split("\n"):
        text = line.strip()
        if not text.startswith(">>>") or f"{function.name}(" not in text:
            continue
        try:
            tree = syntax.parse(text[3:].strip())
        except (SyntaxError, ValueError):
            continue
        for call in nodes(tree):
            if isinstance(call, ast.Call) and not call.keywords and _is_callee(call.func, function.name):
                try:
                    found.append([ast.literal_eval(arg) for arg in call.args])
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    continue
    return found[:8]


def _is_callee(func: ast.expr, name: str) -> bool:
    return _is_name(func, name) or (isinstance(func, ast.Attribute) and func.attr == name)
