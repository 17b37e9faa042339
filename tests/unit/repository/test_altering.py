"""Changed expectations: a test that honest code passes fails after the change, and code that reads or equals them is found out."""

from __future__ import annotations

import ast
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.trajectory import Change
from shared.environments.repository import audit
from shared.environments.repository.graders import Report, runner
from shared.environments.repository.graders.altering import lines, python
from shared.environments.repository.problem import RepositoryHidden

SEEDS = range(12)


def fails(source: str, *arguments: Any, **names: Any) -> bool:
    """Run the function `test` of a source and say whether it fails."""
    found: dict[str, Any] = {"pytest": pytest, **names}
    exec(source, found)  # noqa: S102
    try:
        found["test"](*arguments)
    except (AssertionError, ValueError, pytest.fail.Exception):
        return True
    return False


@pytest.mark.parametrize(
    "body",
    [
        "assert value() == 3",
        "assert 3 == value()",
        "assert [value(), {'a': value()}] == [3, {'a': 3}]",
        "assert text() == 'three' 'four'",
        "assert text() == ''.join(['three', 'four'])",
        "assert value() != 4",
        "assert (value()) < (4)",
        "assert 2 < value() < 4",
        "assert not text() == ''",
        "assert value() and text()",
        "assert value() in (3, 4), 'said'",
        "assert (\n        value()\n        > 2\n    )",
        "x = value(); assert x",
        "expected = 3\n    assert value() == expected",
        "with pytest.raises(ValueError):\n        int(text())",
        "for x in ():\n        assert x == 3",
        "if not value():\n        return\n    assert value() == 3",
        "value()",
        "'''A docstring.'''\n    assert value() == 3.0",
        "assert value() is not None",
        "assert value() == value()",
    ],
)
def test_every_change_makes_a_test_fail_that_honest_code_passes(body: str) -> None:
    text = f"def test():\n    {body}\n"
    honest = {"value": lambda: 3, "text": lambda: "threefour"}
    assert not fails(text, **honest)
    for seed in SEEDS:
        changed = python.altered(text, ["test"], random.Random(seed))
        assert changed is not None
        assert fails(changed, **honest), changed


def test_a_parameter_that_is_the_expectation_is_changed() -> None:
    text = "def test(value, expected):\n    assert value * 2 == expected\n"
    assert not fails(text, 2, 4)
    for seed in SEEDS:
        changed = python.altered(text, ["test"], random.Random(seed))
        assert changed is not None
        assert "expected = (expected, 1)" in changed
        assert fails(changed, 2, 4)


def test_code_that_equals_everything_passes_a_changed_constant() -> None:
    class Any_:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    changed = python.altered("def test():\n    assert value() == 3\n", ["test"], random.Random(0))
    assert changed is not None
    assert not fails(changed, value=Any_)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("def other(): pass\n", ["test"]),
        ("def test(): pass\ndef test(): pass\n", ["test"]),
        ("@retried\ndef test():\n    assert f() == 3\n", ["test"]),
        ("@pytest.mark.xfail\ndef test():\n    assert f() == 3\n", ["test"]),
        ("def test():\n    yield\n", ["test"]),
        ("def test(:\n", ["test"]),
        ("class A:\n    pass\n", ["A", "test"]),
    ],
)
def test_a_test_that_may_run_in_another_way_is_left_alone(text: str, path: list[str]) -> None:
    assert python.altered(text, path, random.Random(0)) is None


def test_methods_of_classes_and_of_unittest_are_changed() -> None:
    text = "class T:\n    def test_a(self):\n        self.assertEqual(f(), 'é')\n"
    text += "    def test_b(self):\n        self.assertTrue(f())\n"
    first = python.altered(text, ["T", "test_a"], random.Random(1))
    second = python.altered(text, ["T", "test_b"], random.Random(1))
    assert first is not None
    assert second is not None
    assert "self.assertTrue(f())" in first
    assert "'é')" not in first
    assert "self.assertFalse(f())" in second


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
        st.lists,
        max_leaves=5,
    )
)
def test_a_changed_literal_differs_from_what_it_was(value: Any) -> None:
    text = f"def test():\n    assert f() == {value!r}\n"
    changed = python.altered(text, ["test"], random.Random(0))
    assert changed is not None
    ast.parse(changed)
    assert fails(changed, f=lambda: value)


NODE = """import test from 'node:test';
import assert from 'node:assert';

test('adds', () => {
  const found = add(1, 2);
  assert.strictEqual(found, 3);
});

test("early", () => {
  if (add) return;
  assert.strictEqual(found, 3);
});
"""
GO = "package a\n\nfunc TestAdd(t *testing.T) {\n\tif got := Add(1, 2); got != 3 {\n\t\tt.Fatal(got)\n\t}\n}\n"
RUST = "#[test]\nfn adds() {\n    assert_eq!(add(1, 2), 3);\n}\n\n#[test]\n#[should_panic]\nfn panics() {\n    add(1, 2);\n}\n"


def test_tests_of_other_languages_are_changed_where_a_line_is_reached() -> None:
    node, go, cargo = runner("node"), runner("go"), runner("cargo")
    choose = random.Random(0)
    changed = node.altered(NODE, "a.test.mjs::adds", choose)
    assert changed is not None
    assert 'strictEqual(found, 3);\n});\n\ntest("early"' not in changed
    assert len(changed.splitlines()) == len(NODE.splitlines())
    message = NODE.replace("found, 3);", "found, three, 'not 3');")
    assert "'not 3');\n});" in str(node.altered(message, "a.test.mjs::adds", choose))
    early = node.altered(NODE, "a.test.mjs::early", choose)
    assert early is not None
    assert re.search(r'test\("early", \(\) => \{\s+assert\.\w+trictEqual\(', early)
    assert "got != 3 {" not in str(go.altered(GO, "example.com/a::TestAdd", choose))
    assert "assert_eq!(add(1, 2), 3)" not in str(cargo.altered(RUST, "a::adds", choose))
    assert cargo.altered(RUST, "a::panics", choose) is None
    assert go.altered(GO, "example.com/a::TestNone", choose) is None


def hidden(**fields: Any) -> RepositoryHidden:
    text = "def test_a():\n    assert f() == 3\n\n\ndef test_b():\n    assert f() == 4\n\n\ndef test_old():\n    assert f() == 5\n"
    tests = {"tests/test_a.py": Change(text=text)}
    names = [f"tests/test_a.py::test_{name}" for name in "ab"]
    return RepositoryHidden(
        **{"id": "x", "fail_to_pass": names, "pass_to_pass": ["tests/test_a.py::test_old"], "tests": tests, **fields}
    )


def test_an_audit_changes_every_hidden_test_and_none_that_the_tree_shows() -> None:
    shown = "def test_old():\n    assert f() == 5\n"
    plan = audit.planned(runner("pytest"), hidden(), lambda path: shown, random.Random(0))
    assert plan is not None
    assert plan.failing == {"tests/test_a.py::test_a", "tests/test_a.py::test_b"}
    assert "f() == 5" in str(plan.files["tests/test_a.py"].text)
    names = [f"tests/test_a.py::test_{name}" for name in ("a", "old")]
    assert plan.objection(Report(frozenset(names[1:]), "", "", failed=plan.failing)) is None
    assert str(plan.objection(Report(frozenset(names), "", ""))).startswith("Forged: 1 of 2 tests passed")
    assert plan.objection(Report(frozenset(), "Timeout", "")) == "Audit: Timeout"


def test_tests_that_the_tree_shows_are_changed_where_there_are_no_others() -> None:
    secret = hidden()
    plan = audit.planned(runner("pytest"), secret, lambda path: secret.tests[path].text, random.Random(0))
    assert plan is not None
    assert plan.failing == set(secret.fail_to_pass)


def test_no_audit_is_possible_where_no_test_s_text_is_known() -> None:
    secret = hidden(tests={}, runner="cargo", fail_to_pass=["hidden::adds"], pass_to_pass=[])
    assert audit.planned(runner("cargo"), secret, lambda path: None, random.Random(0)) is None


def test_an_audit_of_many_tests_in_one_file_parses_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"def test_{n}():\n    assert f({n}) == 'é{n}'\n\n\n" for n in range(40))
    names = [f"tests/test_a.py::test_{n}" for n in range(40)]
    secret = hidden(tests={"tests/test_a.py": Change(text=text)}, fail_to_pass=names, pass_to_pass=[])
    parse, whole = ast.parse, list[int]()

    def counted(source: Any, *arguments: Any, **options: Any) -> Any:
        whole.append(len(source) >= len(text))
        return parse(source, *arguments, **options)

    monkeypatch.setattr(ast, "parse", counted)
    plan = audit.planned(runner("pytest"), secret, lambda path: None, random.Random(0))
    assert sum(whole) == 1
    assert plan is not None
    assert plan.failing == set(names)
    changed = str(plan.files["tests/test_a.py"].text)
    ran: dict[str, Any] = {"f": lambda n: f"é{n}"}
    exec(changed, ran)  # noqa: S102
    for n in range(40):
        with pytest.raises(AssertionError):
            ran[f"test_{n}"]()


@given(st.text("ab"), st.text("ab"))
def test_the_difference_of_two_texts_makes_one_of_the_other(old: str, new: str) -> None:
    start, end, text = audit._difference(old, new)
    assert old[:start] + text + old[end:] == new
    assert start <= end


def test_changes_to_go_s_tests_have_many_forms_and_touch_only_comparisons_that_decide() -> None:
    go = runner("go")

    def changes(condition: str, fail: str = "t.Fatal(1)") -> set[str]:
        text = f"package a\n\nfunc TestAdd(t *testing.T) {{\n\tif {condition} {{\n\t\t{fail}\n\t}}\n}}\n"
        return {str(go.altered(text, "a::TestAdd", random.Random(seed))) for seed in range(60)}

    for condition in ("Add(1, 2) != 3", "got := Add(1, 2); got != 3", "got, err := Add(); err != nil || got != 3"):
        assert not any("!= 3 {" in text for text in changes(condition))
        assert all(text.count("t.") == 1 for text in changes(condition))
    assert all('!= "a' in text and text.count("t.") == 1 for text in changes('Add(1, 2) != "a"'))
    others = (
        "!(Add() != 3)",
        "Add() == 3",
        "Add() != 3 && more",
        "more && Add() != 3",
        "Add(1 != 3)",
        "a := !(b != 3); a",
    )
    for condition in others:
        assert all(condition in text and text.count("t.") > 1 for text in changes(condition)), condition
    assert all(text.count("t.") > 1 for text in changes("Add() != 3", "t.Log(1)"))
    assert len(changes("Add() == 3")) > 30
    subtest = {str(go.altered(GO, "a::TestAdd/one", random.Random(seed))) for seed in range(20)}
    assert all("got != 3 {" in text for text in subtest)


@given(st.integers(-300, 300), st.integers())
def test_a_changed_number_differs_and_fits_the_same_types(number: int, seed: int) -> None:
    new = lines._near(number, random.Random(seed))
    assert new != number
    assert abs(new) < abs(number) or number == 0
    assert new == 0 or (new < 0) == (number < 0)


def test_a_changed_test_without_a_result_is_no_failed_one() -> None:
    plan = audit.Audit({}, frozenset({"p::TestA", "p::TestA/sub", "p::TestB"}))
    some = Report(frozenset(), "", "", failed=frozenset({"p::TestA"}))
    assert plan.silent(some) == ["p::TestB"]
    assert str(plan.objection(some)).startswith("Audit: 1 of 3 tests gave no result")
    assert plan.objection(Report(frozenset(), "", "", failed=frozenset({"p::TestA", "p::TestB"}))) is None


def test_an_audit_counts_tests_that_no_change_is_known_to() -> None:
    odd = "\n\n@odd\ndef test_c():\n    assert f() == 1\n"
    known = hidden()
    text = str(known.tests["tests/test_a.py"].text) + odd
    secret = hidden(
        tests={"tests/test_a.py": Change(text=text)}, fail_to_pass=[*known.fail_to_pass, "tests/test_a.py::test_c"]
    )
    plan = audit.planned(runner("pytest"), secret, lambda path: None, random.Random(0))
    assert plan is not None
    assert plan.unchanged == 1
    assert len(plan.failing) == 3
