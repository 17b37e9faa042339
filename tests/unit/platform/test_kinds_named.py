"""Only environments and the format of problems know the kinds by name: a kind of others needs no file of the project.

What anyone else must know of a problem they ask its type (`shared.problems.Problem`) or its environment (`shared.environments`).
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.environments import registry

ROOT = Path(__file__).resolve().parents[3]
OWNERS = (
    "shared/environments",
    "shared/problems",
)  # environments; the lines and packs, in which `function` is the default
BUILT_IN = ("agent", "function", "repository", "verifiers")
STRUCTS = {
    struct.__name__ for kind in BUILT_IN for struct in (registry.factory(kind).problem, registry.factory(kind).hidden)
}
# (file, function) → why it may stay.
ALLOWED = {
    ("services/curator/own.py", "_with_image"): "--images is of sources whose rows become repositories",
    ("services/curator/own.py", "_with_agent"): "--agent makes a problem of kind agent of a repository",
    (
        "shared/renderers/fitting.py",
        "_solvable_by_edits",
    ): "warns of functions whose solution no edit reaches, and of no other",
}


def named(text: str) -> Iterator[tuple[str, int]]:
    """Yield function and line of each place that asks for a built-in kind: by its name, or by the type of its structs."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if _asks(node):
            yield function, node.lineno  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(ast.parse(text), "")


def _asks(node: ast.AST) -> bool:
    match node:
        case ast.Compare():
            sides = [node.left, *node.comparators]
            return any(_is_kind(side) for side in sides) and any(_kinds(side) for side in sides)
        case ast.Match(subject=subject):
            return _is_kind(subject) and any(_kinds(one) for one in ast.walk(node) if isinstance(one, ast.Constant))
        case ast.MatchClass(cls=name):
            return _name(name) in STRUCTS
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, types]):
            return any(_name(one) in STRUCTS for one in ast.walk(types))
        case ast.Tuple() | ast.List() | ast.Set():  # a table of kinds, such as ("repository", "agent")
            return len(node.elts) > 1 and _kinds(node)
    return False


def _is_kind(node: ast.AST) -> bool:
    return _name(node) == "kind"


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _kinds(node: ast.AST) -> bool:
    """Return whether a literal holds built-in kinds and nothing else."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return bool(node.elts) and all(_kinds(one) for one in node.elts)
    return isinstance(node, ast.Constant) and node.value in BUILT_IN


def test_no_kind_is_named_outside_of_its_environment() -> None:
    found: dict[tuple[str, str], int] = {}
    for folder in ("etude", "services", "shared"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            if not file.startswith(OWNERS):
                found |= {(file, function): line for function, line in named(path.read_text())}
    new = [f"{file}:{line} ({function})" for (file, function), line in found.items() if (file, function) not in ALLOWED]
    assert new == [], "ask the problem's type or its environment; see this file's first lines"
    assert ALLOWED.keys() - found.keys() == set(), "these places are gone: take them out of ALLOWED"


@pytest.mark.parametrize(
    "line",
    [
        'x = problem.kind == "function"',
        'x = "repository" != kind',
        'x = line.problem.kind in ("repository", "agent")',
        'REPOSITORIES = ("repository", "agent")',
        "x = isinstance(problem, (RepositoryProblem, Other))",
        'match kind:\n    case "verifiers":\n        pass',
        "match problem:\n    case FunctionProblem():\n        pass",
    ],
)
def test_the_scan_finds(line: str) -> None:
    assert list(named(f"def f(problem, kind):\n{textwrap.indent(line, '    ')}"))


@pytest.mark.parametrize(
    "line",
    ['x = role == "function"', 'x = kind == "yarn"', 'x = call.get("function")', "x = isinstance(problem, Problem)"],
)
def test_the_scan_leaves_alone(line: str) -> None:
    assert not list(named(line))
