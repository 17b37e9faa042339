"""A pack in miniature: this project's own functions to pretrain on, and problems made of a few plain functions."""

import ast
import random
from pathlib import Path

import msgspec
import zstandard

from shared.problems import Case, FunctionHidden, FunctionProblem
from shared.problems.mutations import mutants
from shared.problems.values import encode

ROOT = Path(__file__).parents[3]

FUNCTIONS = {
    "train": {
        "def clip(value, low, high):\n    if value < low:\n        return low\n    return min(value, high)": [
            [1, 2, 5],
            [3, 2, 5],
            [9, 2, 5],
            [2, 2, 2],
        ],
        "def runs(text):\n    out = []\n    for c in text:\n        if out and out[-1][0] == c:\n            out[-1][1] += 1\n"
        "        else:\n            out.append([c, 1])\n    return out": [["aab"], [""], ["abc"], ["zzzz"]],
    },
    "dev": {
        "def mean(items):\n    total = 0\n    for item in items:\n        total = total + item\n"
        "    return total / max(1, len(items))": [[[1, 2, 3]], [[]], [[4]], [[5, 5]]]
    },
    "rl": {"def last(items, n):\n    return items[-n:] if n > 0 else []": [[[1, 2], 1], [[1, 2], 0], [[1], 3]]},
    "held_out": {"def shout(text):\n    return text.upper() + '!' * len(text)": [["a"], ["bc"], [""]]},
}


def outcome(source: str, args: list) -> str:
    """What the function returns, or the exception's name. The sources are this file's own: no sandbox is needed."""
    space: dict = {}
    exec(compile(source, "<fixture>", "exec"), space)  # noqa: S102
    function = next(value for name, value in space.items() if name != "__builtins__")
    try:
        return encode(function(*args))
    except Exception as error:
        return type(error).__name__


def make_problems(functions: dict[str, list], count: int = 6) -> list[tuple[FunctionProblem, FunctionHidden]]:
    pairs = []
    for source, inputs in functions.items():
        entry = source[4 : source.index("(")]
        cases = [Case(args=encode(args), expected=outcome(source, args)) for args in inputs]
        for mutant in mutants(source, random.Random(3)):
            actual = [outcome(mutant.source, args) for args in inputs]
            if len(pairs) < count * len(functions) and actual[:2] != [c.expected for c in cases[:2]]:
                name = f"{entry}-{len(pairs)}"
                problem = FunctionProblem(
                    id=name, files={"m.py": mutant.source}, entry=entry, visible=cases[:2], actual=actual[:2]
                )
                pairs.append(
                    (problem, FunctionHidden(id=name, cases=cases[2:], solution={"m.py": source}, bug=mutant.kind))
                )
    return pairs


def own_functions() -> list[str]:
    """Functions of the project's own source. Stubs of Protocols are left out: but for their names they are all alike."""
    sources = []
    for path in sorted([*(ROOT / "shared").rglob("*.py"), *(ROOT / "services" / "trainer" / "base").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.FunctionDef)
                and (text := ast.unparse(node)).count("\n") < 20
                and not text.endswith("...")
            ):
                sources.append(text)
    return sources


def write_lines(path: Path, items: list) -> None:
    path.write_bytes(zstandard.compress(b"".join(msgspec.json.encode(item) + b"\n" for item in items)))
