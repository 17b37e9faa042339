"""Mutants are one-line bugs: what the base recipe and the curator rely on."""

from __future__ import annotations

import ast
import random

import pytest

from shared.problems.mutation_rules import KINDS
from shared.problems.mutations import Mutations, mutants

SOURCE = ast.unparse(
    ast.parse(
        """
def f(xs, n=3, sep=', ', strict=True):
    total = 0
    for i, x in enumerate(xs):
        if x < n and (not x == 4):
            total += x * 2 + 1
        elif x in xs[i:]:
            break
        else:
            total = max(total, xs[i - 1]) - xs[-1]
    try:
        s = sep.join(str(v).strip() for v in sorted(xs) if v)
    except ValueError:
        return None
    return s[1:] if total > 0 else (s, -total)
"""
    )
)


def test_a_mutant_differs_in_exactly_the_line_it_names():
    good = SOURCE.split("\n")
    for mutant in mutants(SOURCE, random.Random(1)):
        bad = mutant.source.split("\n")
        changed = [index for index in range(len(good)) if good[index] != bad[index]]
        assert changed == [mutant.line]
        assert (good[mutant.line].strip(), bad[mutant.line].strip()) == (mutant.good, mutant.bad)
        assert good[mutant.line].index(mutant.good) == bad[mutant.line].index(mutant.bad)
        ast.parse(mutant.source)


def test_rendering_leaves_the_original_as_it_was():
    mutations = Mutations(SOURCE)
    first = [mutations.render(site) for site in mutations.sites]
    assert first == [mutations.render(site) for site in mutations.sites]


def test_every_kind_of_bug_that_the_source_offers_is_made():
    kinds = {mutant.kind for mutant in mutants(SOURCE, random.Random(1))}
    assert kinds == set(KINDS) - {"flag", "string"}


@pytest.mark.parametrize(
    ("good", "bad", "kind"),
    [
        ("return g(a, b)", "return g(b, a)", "arguments"),
        ("return a + b", "return a - b", "arithmetic"),
        ("return a - b", "return b - a", "operands"),
        ("return a < b", "return a <= b", "comparison"),
        ("return a and b", "return a or b", "boolean"),
        ("return not a", "return a", "negation"),
        ("return b[a - 1]", "return b[a]", "plus_one"),
        ("return a[:b]", "return a[b:]", "slice"),
        ("return a[-1]", "return a[0]", "index"),
        ("return a.strip()", "return a.lstrip()", "method"),
        ("return min(a)", "return max(a)", "builtin"),
        ("return [x for x in range(a)]", "return [x for x in range(a - 1)]", "range"),
        ("return a if b else 0", "return 0 if b else a", "branches"),
        ("return a", "return b", "return"),
        ("return g(a)", "return g(b)", "variable"),
        ("return g(a, key=True)", "return g(a, key=False)", "flag"),
        ("return g(a, key=True)", "return g(a)", "arguments"),
        ("return a == 3", "return a == 4", "constant"),
        ("return a == 'x '", "return a == 'x'", "string"),
        ("return int(a)", "return a", "dropped_call"),
        ("return a and b", "return a", "dropped_term"),
    ],
)
def test_bugs_that_programmers_write(good: str, bad: str, kind: str):
    source = f"def f(a, b):\n    {good}"
    assert (kind, bad) in {(mutant.kind, mutant.bad) for mutant in mutants(source, random.Random(0))}


def test_a_condition_is_inverted_and_a_jump_confused():
    source = "def f(xs, ok):\n    for x in xs:\n        if ok(x):\n            continue\n        return x"
    made = {(mutant.kind, mutant.bad) for mutant in mutants(source, random.Random(0))}
    assert ("condition", "if not ok(x):") in made
    assert ("jump", "break") in made


def test_the_order_follows_the_seed_alone():
    def drawn(seed: str) -> list[str]:
        return [mutant.source for mutant in mutants(SOURCE, random.Random(seed))]

    assert drawn("a") == drawn("a")
    assert drawn("a") != drawn("b")
    assert sorted(drawn("a")) == sorted(drawn("b"))


def test_variables_of_a_comprehension_are_mistaken_only_inside_it():
    source = "def f(xs, n):\n    ys = [x + n for x in xs]\n    return ys[n]"
    assert not any("x]" in mutant.bad for mutant in mutants(source, random.Random(0)) if mutant.line == 2)
