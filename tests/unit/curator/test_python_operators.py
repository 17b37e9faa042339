"""Bugs in a function's own text."""

from __future__ import annotations

import ast
import difflib
import random

import pytest

from services.curator.sources.python.functions import Function, functions
from services.curator.sources.python.operators import Mutant, mutants

SOURCE = '''from __future__ import annotations


class Store:
    """Keeps things."""

    @property
    def size(self) -> int:
        return len(self._held)

    def put(self, key: str, value, *, twice=False):
        """Keep a value, "quoted"."""
        if key in self._held:
            raise KeyError("is there")
        self._held[key] = value  # a comment stays
        for other in sorted(self._others, reverse=True):
            other.tell(key, value)
        if twice and value > 1:
            return self.get(key, "none", 3)
        return value


def ratio(a, b):
    try:
        return a / b
    except ZeroDivisionError:
        return 0
'''


def of(name: str) -> Function:
    return next(one for one in functions("store.py", SOURCE) if one.qualname == name)


def every(name: str) -> list[Mutant]:
    return list(mutants(of(name), random.Random(1)))


def changed(mutant: Mutant) -> list[str]:
    old, new = mutant.function.text.splitlines(), mutant.text.splitlines()
    return [line for line in list(difflib.unified_diff(old, new, lineterm="", n=0))[2:] if line[:1] in "+-"]


def test_functions_and_methods_are_found_with_their_decorators():
    found = functions("store.py", SOURCE)
    assert [one.qualname for one in found] == ["Store.size", "Store.put", "ratio"]
    assert found[0].text.startswith("    @property\n")
    assert [one.holder for one in found] == ["Store", "Store", ""]


@pytest.mark.parametrize("name", ["Store.put", "ratio"])
def test_every_mutant_is_another_function_that_parses_within_the_module(name: str):
    found = every(name)
    assert len(found) >= 6
    assert len({one.text for one in found}) == len(found)
    for one in found:
        module = ast.parse(one.function.within(SOURCE, one.text))
        assert ast.dump(module) != ast.dump(ast.parse(SOURCE))


def test_kinds_of_bugs():
    kinds = {one.kind for one in every("Store.put")} | {one.kind for one in every("ratio")}
    assert {"removed", "arguments", "condition", "comparison", "exception", "arithmetic"} <= kinds


def test_a_change_leaves_the_rest_of_the_text_as_it_is():
    for one in every("Store.put"):
        removed = [line for line in changed(one) if line.startswith("-")]
        assert len(removed) <= 3, one
        assert '"""Keep a value, "quoted"."""' in one.text
        if not any("a comment stays" in line for line in removed):
            assert "# a comment stays" in one.text


def test_the_line_is_that_of_the_file():
    lines = SOURCE.splitlines()
    for one in every("ratio"):
        assert one.function.start <= one.statement <= one.line <= one.function.end
        assert lines[one.line - 1].strip()


def test_text_of_errors_docstrings_and_the_line_of_def_stay():
    for one in every("Store.put"):
        assert "twice=False" in one.text
        assert '"is there"' in one.text or "raise" not in one.text


def test_source_that_this_python_cannot_read_has_no_functions():
    assert functions("old.py", "print 'hello'") == []
