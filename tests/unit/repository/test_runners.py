"""Results of node, go and cargo as their runners write them, with what candidate code prints among them."""

from __future__ import annotations

import json

import pytest

from shared.environments.repository.graders import cargo_runner, go_runner, node_runner, runner

TAP = """TAP version 13
# ok 9 - printed by a test
# Subtest: calc
    # Subtest: adds
    ok 1 - adds
      ---
      duration_ms: 19.1
      ...
    # Subtest: later
    ok 2 - later # SKIP
      ---
      duration_ms: 0.1
      ...
    1..2
ok 1 - calc
  ---
  type: 'suite'
  ...
# Subtest: top
not ok 2 - top
  ---
  error: |-
    ok 1 - in a message
    ok 2 - adds
  code: 'ERR_ASSERTION'
  ...
# Subtest: twice
ok 3 - twice
# Subtest: twice
not ok 4 - twice
1..4
"""
LIBTEST = """
running 4 tests
test adds ... ok
test tests::later ... ignored
test panics - should panic ... ok
test prints ... FAILED

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.50s
"""


def test_node_s_tests_pass_only_where_tap_says_so_outside_of_messages() -> None:
    passed, failed = node_runner.outcomes(TAP)
    assert passed == {"calc", "calc > adds"}
    assert failed == {"top", "twice"}


def test_cargo_s_tests_pass_only_in_a_run_that_ended() -> None:
    assert cargo_runner.outcomes(LIBTEST) == ({"adds", "panics"}, {"prints"})
    assert cargo_runner.outcomes(LIBTEST.partition("test result")[0]) == (set(), set())


def test_go_s_tests_pass_only_with_one_result_in_a_package_that_ended() -> None:
    def event(action: str, test: str = "") -> str:
        return json.dumps({"Action": action, "Package": "p", **({"Test": test} if test else {})})

    lines = [event("run", "TestA"), event("pass", "TestA"), event("skip", "TestB"), event("pass", "TestC")]
    lines += [event("fail", "TestC"), "no json", "[]", '{"Action": "pass"}', event("pass", "TestA/sub")]
    assert go_runner.outcomes("\n".join(lines)) == (frozenset(), frozenset())
    assert go_runner.outcomes("\n".join([*lines, event("fail")])) == (
        {"p::TestA", "p::TestA/sub"},
        {"p::TestC"},
    )


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("pytest", "a/test_b.py::C::test_d[e]", "a/test_b.py"),
        ("unittest", "a/test_b.py::C::test_d", "a.test_b.C"),
        ("node", "test/a.test.mjs::suite > test", "test/a.py::x"),
        ("go", "example.com/a::TestB/sub one", "example.com/a"),
        ("cargo", "hidden::tests::adds", "adds"),
        ("cargo", "library::adds", "lib::tests::adds"),
    ],
)
def test_a_runner_says_which_names_it_takes(name: str, good: str, bad: str) -> None:
    assert runner(name).wrong_name(good) is None
    assert runner(name).wrong_name(bad)
