"""Pretraining samples: functions to be read, and functions with several bugs to be repaired by span edits.

    code       <task> lines <eos>
    denoising  <task> lines with 1-6 bugs <end> <edit>… <end> … <eos>      one edit per bug, in the order of the lines

Renaming the variables of a function is the augmentation: what a name meant before no longer helps.
"""

from __future__ import annotations

import ast
import random

from services.trainer.base.samples import Sample, Weight
from shared import syntax
from shared.problems.mutations import Mutations
from shared.renderers.formats.compact_1 import MAX_LINES, Compact

BUG_COUNTS = (1, 2, 3, 4, 5, 6)  # many: every repaired line teaches copying, for the price of reading the function once
BUG_SHARES = (0.2, 0.2, 0.2, 0.15, 0.15, 0.1)
MAX_SPAN = 14  # tokens of OLD and NEW together: a longer one is no slip
_NAMES = tuple(
    " ".join(
        [
            "a b c d e x y z n m k i j p q s t v w text word line item items data values result res out total count cur",
            "prev left right start end idx key val node name num size seq arr acc tmp buf char path first last low high",
        ]
    ).split()
)


def code_sample(source: str, format: Compact) -> Sample | None:
    """The function as it is; None when it does not fit."""
    if not fits(source):
        return None
    return Sample.of(([*format.code(source), format.eos], Weight.context))


def denoising_sample(source: str, format: Compact, rng: random.Random) -> Sample | None:
    """None where the source has no bug to make, or does not fit."""
    if not fits(source):
        return None
    lines = source.rstrip("\n").split("\n")
    wanted = rng.choices(BUG_COUNTS, BUG_SHARES)[0]
    repairs: dict[int, list[int]] = {}
    for mutant in Mutations("\n".join(lines)).draw(rng):
        if mutant.line in repairs:
            continue
        call = format.edit_call(mutant.line, mutant.bad, mutant.good)
        if call is None or len(call) > MAX_SPAN + 4:
            continue
        indent = lines[mutant.line][: len(lines[mutant.line]) - len(lines[mutant.line].lstrip())]
        lines[mutant.line] = indent + mutant.bad
        repairs[mutant.line] = call
        if len(repairs) == wanted:
            break
    if not repairs:
        return None
    answer = [token for line in sorted(repairs) for token in repairs[line]]
    return Sample.of(
        ([*format.code("\n".join(lines)), format.end], Weight.context), ([*answer, format.eos], Weight.action)
    )


def fits(source: str) -> bool:
    return source.isascii() and source.count("\n") < MAX_LINES and len(source) <= 1600


def renamed(source: str, rng: random.Random) -> str:
    """The same function with other names for its own variables."""
    return rename(source, renaming(source, rng))


def renaming(source: str, rng: random.Random) -> dict[str, str]:
    """A fresh name for each of the source's own variables. Parameters that are passed by keyword keep theirs."""
    tree = syntax.parse(source)
    bound = sorted(_bound(tree))
    fixed = {k.arg for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg} | _free(tree, bound)
    fresh = [name for name in _NAMES if name not in fixed and name not in bound]
    rng.shuffle(fresh)
    return {old: new for old, new in zip((b for b in bound if b not in fixed), fresh, strict=False)}


def rename(source: str, names: dict[str, str]) -> str:
    """Every variable of `names` by its new name; written as `ast.unparse` writes it."""
    tree = syntax.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = names.get(node.arg, node.arg)
        elif isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            node.name = names.get(node.name, node.name)
    return ast.unparse(tree)


def _bound(tree: ast.AST) -> set[str]:
    """Parameters and local variables; never a function's, a module's or a declared global's name."""
    declared = {name for n in ast.walk(tree) if isinstance(n, ast.Global | ast.Nonlocal) for name in n.names}
    names = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
                elif isinstance(node, ast.ExceptHandler) and node.name:
                    names.add(node.name)
    return names - declared


def _free(tree: ast.AST, bound: list[str]) -> set[str]:
    """Names that a fresh name must not hide."""
    taken = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} - set(bound)
    return taken | {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
