"""Find what makes a test fail although the product is right: sleeps, asserted durations, fixed ports, package managers.

`findings` reads the text of one file; tests/unit/platform/test_steady_tests.py asks it about all of tests/. tests/steady.toml
lists what may stay, with the reason.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LONG_S = 0.2  # a shorter sleep is a pause between two looks, which a slow machine may stretch
KINDS = ("sleep", "elapsed", "port", "packages")

CLOCKS = (
    "monotonic",
    "perf_counter",
    "process_time",
    "thread_time",
    "monotonic_ns",
    "perf_counter_ns",
    "time",
    "time_ns",
)
DURATION = re.compile(r"(^|_)(took|elapsed|duration|lasted)(_|$)")

THIS_MACHINE = re.compile(r"(?:\b127(?:\.\d+){3}|\blocalhost|\b0\.0\.0\.0|\[::1?\]):(\d{4,5})\b")
HOSTS = re.compile(r"127(\.\d+){3}|localhost|0\.0\.0\.0|::1?")
PORT_NAME = re.compile(r"(^|_|-)ports?$", re.IGNORECASE)
PORTS = range(1024, 65536)

STARTERS = ("run", "Popen", "call", "check_call", "check_output", "system", "getoutput", "create_subprocess_exec",
            "create_subprocess_shell")  # fmt: skip
MANAGERS = {
    "apt-get": {"install", "update", "download", "source"},
    "apt": {"install", "update"},
    "pip": {"install", "download", "wheel"},
    "uv": {"pip", "sync", "add", "venv", "python", "tool", "run"},
    "playwright": {"install", "install-deps"},
    "go": {"mod", "get", "install", "run", "build", "test"},
    "npm": {"install", "ci", "exec"},
    "cargo": {"install", "fetch", "build"},
    "conda": {"install", "create"},
}
# Functions of ours that fetch what is missing.
FETCHERS = {("debian", "program"), ("debian", "installed"), ("pgbouncer", "install"), ("sglang_cpu", "install")}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    file: str
    function: str  # `test_x.scenario`; empty: the module itself
    kind: str  # one of KINDS
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind} in {self.function or 'the module'}: {self.text}"


def findings(source: str, file: str = "") -> list[Finding]:
    """Return all that the text of a file does against the rules above."""
    tree = ast.parse(source)
    return sorted(
        Finding(file, function, kind, node.lineno, ast.unparse(node).partition("\n")[0])
        for function, scope, node in _walk(tree, "", [tree])
        for kind in _kinds(node, scope)
    )


def _walk(node: ast.AST, function: str, scope: list[ast.AST]) -> Iterator[tuple[str, list[ast.AST], ast.AST]]:
    """Yield every node below, with the name of the function that holds it, and the functions around it, outermost first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{function}.{child.name}".lstrip(".")
            yield inner, [*scope, child], child
            yield from _walk(child, inner, [*scope, child])
        else:
            yield function, scope, child
            yield from _walk(child, function, scope)


def _kinds(node: ast.AST, scope: Sequence[ast.AST]) -> Iterator[str]:
    if isinstance(node, ast.Call) and _sleeps(node, scope):
        yield "sleep"
    if isinstance(node, ast.Assert) and _bounds_time(node, scope):
        yield "elapsed"
    if _is_port(node):
        yield "port"
    if _installs(node, scope):
        yield "packages"


# Sleeps


def _sleeps(call: ast.Call, scope: Sequence[ast.AST]) -> bool:
    """Say whether it waits for long, or for nobody can see how long."""
    if _dotted(call.func) not in ("sleep", "time.sleep", "asyncio.sleep") or not call.args:
        return False
    seconds = _number(call.args[0], scope)
    return seconds is None or seconds >= LONG_S


def _number(node: ast.expr, scope: Sequence[ast.AST]) -> float | None:
    """Return the largest value that an expression can have, or None if the text does not show it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.IfExp):
        both = [_number(node.body, scope), _number(node.orelse, scope)]
        return None if None in both else max(both)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left, scope), _number(node.right, scope)
        if left is None or right is None:
            return None
        return _calculated(node.op, left, right)
    if isinstance(node, ast.Name):
        given = [_number(value, []) for value in _assigned(node.id, scope)]
        return None if None in given or not given else max(given)
    return None


def _calculated(op: ast.operator, left: float, right: float) -> float | None:
    if isinstance(op, ast.Mult):
        return left * right
    if isinstance(op, ast.Add):
        return left + right
    if isinstance(op, ast.Sub):
        return left - right
    if isinstance(op, ast.Div) and right:
        return left / right
    return None


def _assigned(name: str, scope: Sequence[ast.AST]) -> list[ast.expr]:
    """Return what a name is set to in the innermost function around that sets it, else in the module."""
    for holder in reversed(scope):
        if isinstance(holder, ast.FunctionDef | ast.AsyncFunctionDef) and name in _parameters(holder):
            return []
        values = [value for target, value in _assignments(holder) if isinstance(target, ast.Name) and target.id == name]
        if values:
            return values
    return []


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _assignments(holder: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield targets with their values, those of inner functions too. `a, b = 1, 2` are two."""
    for node in ast.walk(holder):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
            pairs = [(node.target, node.value)]
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from zip(target.elts, value.elts, strict=False)
            else:
                yield target, value


# Durations


def _bounds_time(node: ast.Assert, scope: Sequence[ast.AST]) -> bool:
    """Say whether it asserts that something took at most so long."""
    for compare in (one for one in ast.walk(node.test) if isinstance(one, ast.Compare)):
        sides = [compare.left, *compare.comparators]
        for op, (left, right) in zip(compare.ops, itertools.pairwise(sides), strict=True):
            small = left if isinstance(op, ast.Lt | ast.LtE) else right if isinstance(op, ast.Gt | ast.GtE) else None
            if small is not None and _is_time(small, scope):
                return True
    return False


def _is_time(node: ast.expr, scope: Sequence[ast.AST], names: bool = True) -> bool:
    """Say whether a real clock is read in an expression, or in what its names were set to, or a name says so."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call) and _reads_clock(one):
            return True
        if isinstance(one, ast.Attribute) and DURATION.search(one.attr):
            return True
        if isinstance(one, ast.Name) and (
            DURATION.search(one.id)
            or (names and any(_is_difference(value, scope) for value in _assigned(one.id, scope)))
        ):
            return True
    return False


def _is_difference(node: ast.expr, scope: Sequence[ast.AST]) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _is_time(node, scope, names=False)


def _reads_clock(call: ast.Call) -> bool:
    holder, _, name = _dotted(call.func).rpartition(".")
    return name in CLOCKS and (holder in ("time", "loop") or not holder) and not call.args


# Ports


def _is_port(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return bool(node.arg and PORT_NAME.search(node.arg) and _fixed(node.value))
    if isinstance(node, ast.Assign):
        names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        return any(PORT_NAME.search(name) for name in names) and _fixed(node.value)
    if isinstance(node, ast.Dict):
        return any(_names_port(key) and _fixed(value) for key, value in zip(node.keys, node.values, strict=True))
    if isinstance(node, ast.Tuple | ast.List):
        return any(_is_host(one) and _fixed(two) for one, two in itertools.pairwise(node.elts)) or any(
            _names_port(one) and _fixed(two) for one, two in itertools.pairwise(node.elts)
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return any(int(found) in PORTS for found in THIS_MACHINE.findall(node.value))
    return False


def _fixed(node: ast.expr) -> bool:
    """Say whether it is the number of a port, or several, written as a number or as text."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(_fixed(one) for one in node.elts)
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool):
        return False
    text = str(node.value)
    return text.isascii() and text.isdigit() and int(text) in PORTS


def _names_port(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(PORT_NAME.search(node.value))


def _is_host(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(HOSTS.fullmatch(node.value))


# Package managers


def _installs(node: ast.AST, scope: Sequence[ast.AST]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if _fetcher(node.func, scope):
        return True
    if _dotted(node.func).rpartition(".")[2] not in STARTERS:
        return False
    return any(_commands_install(_words(argument, scope)) for argument in node.args[:1]) or _commands_install(
        [word for argument in node.args for word in _words(argument, scope)]
    )


def _fetcher(function: ast.expr, scope: Sequence[ast.AST]) -> bool:
    holder, _, name = _dotted(function).rpartition(".")
    if holder:
        return (holder.rpartition(".")[2], name) in FETCHERS
    if name not in {one for _, one in FETCHERS}:
        return False
    modules = [
        one.module
        for one in ast.walk(scope[0])
        if isinstance(one, ast.ImportFrom) and one.module and name in [alias.name for alias in one.names]
    ]
    return any((module.rpartition(".")[2], name) in FETCHERS for module in modules)


def _words(node: ast.expr, scope: Sequence[ast.AST]) -> list[str]:
    """Return the words of a command that the text shows: of a list, a text, or a name that was set to one."""
    if isinstance(node, ast.Name):
        return [word for value in _assigned(node.id, scope) for word in _words(value, [])]
    if isinstance(node, ast.Starred):
        return _words(node.value, scope)
    if isinstance(node, ast.List | ast.Tuple):
        return [word for one in node.elts for word in _words(one, scope)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"[\s;&|]+", node.value)
    return []


def _commands_install(words: Sequence[str]) -> bool:
    names = [word.rpartition("/")[2] for word in words]
    return any(
        action in MANAGERS.get(re.sub(r"[\d.]+$", "", name), ())
        for i, name in enumerate(names)
        for action in [next((word for word in names[i + 1 :] if not word.startswith("-")), "")]
    )


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` of such a node; of others what can be told, as `.c`."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""
