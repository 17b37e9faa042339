"""Taking a feature out of source texts."""

from __future__ import annotations

import ast

from services.curator.sources.python.removal import head, targets, without_lines, without_name, without_tests

MODULE = '''"""Things."""

__all__ = ["first", "take", "last"]


def take(n, seq):
    """Return the first n elements."""
    return list(seq)[:n]


def last(seq):
    """Return the last element."""
    return seq[-1]


class Box:
    """Holds one thing."""

    def __init__(self, thing):
        self.thing = thing

    def open(self):
        """Return the thing."""
        return self.thing


def _own(x):
    """No feature."""
    return x


def bare(x):
    return x
'''


def test_features_are_public_and_documented():
    assert [one.qualname for one in targets("things.py", MODULE)] == ["take", "last", "Box", "Box.open"]


def test_a_definition_leaves_no_gap():
    take = targets("things.py", MODULE)[0]
    text = without_lines(MODULE, [(take.start, take.end)])
    assert "def take" not in text
    assert "\n\n\n\n" not in text
    assert text.count('"last"]\n\n\ndef last') == 1


def test_a_name_leaves_all_and_imports():
    assert without_name(MODULE, "take").splitlines()[2] == '__all__ = ["first", "last"]'
    assert without_name(MODULE, "last").splitlines()[2] == '__all__ = ["first", "take"]'
    assert without_name("from .things import take\n", "take") == "pass\n"
    assert without_name("from .things import (\n    first,\n    take,\n)\n", "take") == "from .things import first\n"


def test_a_long_import_keeps_one_name_a_line():
    names = [f"function_number_{number}" for number in range(6)]
    text = without_name(f"from .things import {', '.join(names)}\n", names[3])
    assert names[3] not in text
    assert text.splitlines()[1] == f"    {names[0]},"
    ast.parse(text)


TESTS = """import pytest
from things import last, take


def test_take():
    assert take(2, "abc") == ["a", "b"]


class TestLast:
    def test_last(self):
        assert last("abc") == "c"

    def test_of_taken(self):
        assert last(take(2, "abc")) == "b"
"""


def test_tests_that_name_the_feature_leave_the_file():
    text, gone = without_tests(TESTS, "take")
    assert gone == {"test_take", "TestLast::test_of_taken"}
    assert "take" not in text
    assert "def test_last" in text
    ast.parse(text)


def test_a_class_of_tests_goes_when_no_test_is_left():
    text, gone = without_tests(TESTS, "last")
    assert gone == {"TestLast", "TestLast::test_last", "TestLast::test_of_taken"}
    assert "class TestLast" not in text


def test_a_task_shows_signatures_and_docstrings_and_no_code():
    box = targets("things.py", MODULE)[2]
    shown = head(MODULE, box.node)
    assert '"""Holds one thing."""' in shown
    assert "def open(self):" in shown
    assert "return self.thing" not in shown
    assert "self.thing = thing" not in shown
