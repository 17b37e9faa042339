"""Checks of a repository problem: its tests and its solution fit into a tree, or its import is refused."""

from __future__ import annotations

import pytest

from shared.contracts.trajectory import Change
from shared.environments.repository import checks, submission
from shared.environments.repository.problem import RepositoryHidden

LARGE = Change(text="ä" * (submission.MAX_BYTES // 2 + 1))


@pytest.mark.parametrize("field", ["tests", "solution"])
@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        ({"large": LARGE}, "", f"found {submission.MAX_BYTES + 2} bytes in changed files"),
        ({"a": Change(text=""), "a/b": Change(text="")}, "", "'a': found as a file and as a folder"),
        ({"a": Change(text="", data=b"")}, "", "'a': found both text and data"),
        ({"a\n": Change()}, "[a\n]", "has a control character"),
    ],
)
def test_changes_that_no_grading_could_apply_are_refused(
    field: str, changes: dict[str, Change], place: str, words: str
) -> None:
    hidden = RepositoryHidden(id="a", fail_to_pass=["test_a.py::test_a"], **{field: changes})
    wrong = checks.wrong_hidden(hidden)
    assert wrong is not None
    assert wrong[0] == f"hidden.{field}{place}"
    assert words in wrong[1]


def test_a_test_in_the_candidate_s_own_sources_is_refused() -> None:
    tests = {"tests/hidden.rs": Change(text="#[test]\nfn adds() {}\n")}
    names = ["hidden::adds", "lib::tests::adds"]
    hidden = RepositoryHidden(id="a", runner="cargo", fail_to_pass=names, tests=tests)
    wrong = checks.wrong_hidden(hidden)
    assert wrong is not None
    assert wrong[0] == "hidden.fail_to_pass[1]"
    assert wrong[1].startswith("found 'lib::tests::adds'; allowed: TARGET::test for a file tests/TARGET.rs")
