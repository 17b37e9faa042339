"""Python is parsed in `shared.syntax` alone: threads that parse at the same time make each other fail."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# File → why it may parse by itself, or take a literal apart that was parsed before.
ALLOWED = {
    "shared/syntax.py": "holds the lock",
    "services/curator/sources/python/inside/runs.py": "alone in a process of a sandbox, without the platform's code",
    "services/curator/module.py": "literals of a tree",
    "services/curator/lift.py": "literals of a tree",
    "services/curator/fuzz.py": "literals of a tree",
    "shared/environments/repository/graders/altering/python.py": "literals of a tree",
}
PARSING = ("parse", "literal_eval", "PyCF_ONLY_AST")


def parses(text: str) -> Iterator[int]:
    """Yield the line of each place that makes a syntax tree, or may."""
    if not any(name in text for name in PARSING):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            found = node.attr in PARSING and ast.unparse(node.value).endswith("ast")
        else:
            found = (
                isinstance(node, ast.ImportFrom) and node.module == "ast" and any(n.name in PARSING for n in node.names)
            )
        if found:
            yield node.lineno


def test_no_other_file_of_the_platform_parses_python() -> None:
    folders = ("shared", "services", "etude", "docs/examples")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): list(parses(path.read_text())) for path in files}
    wrong = [f"{name}:{line}" for name, lines in found.items() if name not in ALLOWED for line in lines]
    assert not wrong, f"{', '.join(wrong)}: use shared.syntax, or say in ALLOWED why no other thread parses there"
    assert not [name for name in ALLOWED if not found.get(name)], "in ALLOWED, and does not parse"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("import ast\nast.parse('1')", [2]),
        ("import ast as tree_ast\ntree_ast.literal_eval('1')", [2]),
        ("from ast import parse", [1]),
        ("import ast\nast.walk(node)\njson.parse(x)\nsyntax.parse(x)", []),
    ],
)
def test_the_scan_finds(text: str, lines: list[int]) -> None:
    assert list(parses(text)) == lines
