"""Single-line bugs: every way in which a programmer gets one line of a correct function wrong.

Input is source as `ast.unparse` writes it (one statement header a line). A `Site` is one possible bug; `render` turns it
into a `Mutant`, which differs from the original in exactly one line. Sites are cheap and many (a name can be mistaken
for any other); rendering costs about 0.1 ms, so callers draw sites first. The order of sites follows the source alone:
equal source, equal sites, on any machine and any hash seed.

The curator makes repair problems of mutants; the base recipe makes denoising samples and imperfect first tries of them.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shared import syntax
from shared.problems.mutation_rules import Edit, Place, Scope, bugs


@dataclass(frozen=True, slots=True)
class Mutant:
    """`source` is the original with line `line` (zero-based) changed from `good` to `bad` (both without indentation)."""

    kind: str
    line: int
    good: str
    bad: str
    source: str


@dataclass(frozen=True, slots=True)
class Site:
    """One possible bug. `statement`: what stands on the line afterwards, once `edits` are applied."""

    kind: str
    line: int
    statement: ast.AST
    edits: tuple[Edit, ...]


class Mutations:
    """The sites of one source and their rendering. Raises SyntaxError if the source does not parse."""

    def __init__(self, source: str) -> None:
        self._lines = source.split("\n")
        tree = syntax.parse(source)
        scope = Scope.of(tree)
        self.sites: list[Site] = []
        for statement in _statements(tree):
            line = statement.lineno - 1
            if _header(statement, self._lines[line]) != self._lines[line].strip():
                continue  # not on one line as `unparse` writes it, a multi-line string for example
            for place in places(statement):
                for kind, edits, instead in bugs(place, statement, scope):
                    self.sites.append(Site(kind, line, statement if instead is None else instead, edits))

    def render(self, site: Site) -> Mutant | None:
        """None where the bug cannot be written as one changed line."""
        before = [swap(edit) for edit in site.edits]
        try:
            bad = _header(site.statement, self._lines[site.line])
        except (ValueError, AttributeError, TypeError, RecursionError):
            bad = None  # an f-string that this Python cannot write, for example
        finally:
            for edit, value in zip(reversed(site.edits), reversed(before), strict=True):
                swap(Edit(edit.holder, edit.field, edit.index, value))
        old = self._lines[site.line]
        good = old.strip()
        if bad is None or bad == good or "\n" in bad or not bad.isascii():
            return None
        changed = [*self._lines]
        changed[site.line] = old[: len(old) - len(old.lstrip())] + bad
        return Mutant(site.kind, site.line, good, bad, "\n".join(changed))

    def draw(self, rng: random.Random, weights: dict[str, float] | None = None) -> Iterator[Mutant]:
        """All distinct mutants, kinds in turn, so that a common kind (another variable) does not crowd out the rest.
        `weights`: how likely a kind takes its turn, 1 unless named."""
        by_kind: dict[str, list[Site]] = {}
        for site in self.sites:
            by_kind.setdefault(site.kind, []).append(site)
        for sites in by_kind.values():
            rng.shuffle(sites)
        seen: set[tuple[int, str]] = set()
        while by_kind:
            kinds = sorted(by_kind)
            rng.shuffle(kinds)
            for kind in kinds:
                if weights is not None and rng.random() >= weights.get(kind, 1.0):
                    continue
                mutant = self.render(by_kind[kind].pop())
                if not by_kind[kind]:
                    del by_kind[kind]
                if mutant is not None and (mutant.line, mutant.bad) not in seen:
                    seen.add((mutant.line, mutant.bad))
                    yield mutant


def mutants(source: str, rng: random.Random) -> Iterator[Mutant]:
    """Shorthand: the distinct mutants of `source`, kinds in turn."""
    return Mutations(source).draw(rng)


def _statements(tree: ast.AST) -> Iterator[Any]:
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.ExceptHandler) and not isinstance(
            node, ast.Import | ast.ImportFrom | ast.Try
        ):
            yield node


_BLOCKS = ("body", "orelse", "finalbody", "handlers")


def _header(statement: ast.AST, line: str) -> str:
    """The statement as one line, without its blocks."""
    if isinstance(statement, ast.stmt | ast.ExceptHandler) and isinstance(getattr(statement, "body", None), list):
        fields = {name: value for name, value in ast.iter_fields(statement) if name not in _BLOCKS}
        blocks: dict[str, list[ast.stmt]] = {name: [] for name in _BLOCKS if name in statement._fields}
        statement = type(statement)(**{**fields, **blocks, "body": [ast.Pass()]}, lineno=1, col_offset=0)
        text = ast.unparse(statement).strip().removesuffix("pass").rstrip()
        return "el" + text if line.lstrip().startswith("elif ") else text
    return ast.unparse(statement).strip()


def places(statement: ast.AST) -> Iterator[Place]:
    """The statement and every expression in its header, outermost first, in the order of the source."""
    stack = [Place(statement, statement, "", None, ())]
    while stack:
        place = stack.pop()
        yield place
        children: list[Place] = []
        above = (*place.above, place.node)
        for name, value in ast.iter_fields(place.node):
            if isinstance(value, ast.AST):
                children.append(Place(value, place.node, name, None, above))
            elif isinstance(value, list):
                children.extend(
                    Place(item, place.node, name, index, above)
                    for index, item in enumerate(value)
                    if isinstance(item, ast.AST)
                )
        stack.extend(
            child
            for child in reversed(children)
            if not isinstance(child.node, ast.stmt | ast.ExceptHandler | ast.match_case)
        )


def swap(edit: Edit) -> Any:
    """Applies the edit; returns what was there."""
    if edit.index is None:
        before = getattr(edit.holder, edit.field)
        setattr(edit.holder, edit.field, edit.value)
    else:
        items = getattr(edit.holder, edit.field)
        before = items[edit.index]
        items[edit.index] = edit.value
    return before
