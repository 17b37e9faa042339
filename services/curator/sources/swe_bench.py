"""SWE-bench, SWE-bench Multilingual and SWE-Gym: an issue, the commit before its fix, the fix, and the fix's tests.

Fields: `instance_id`, `repo`, `base_commit`, `problem_statement`, `patch`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.curator.sources import Found, Refused
from services.curator.sources.clones import Clones
from services.curator.sources.rows import finished, kept_tests, located, no_runner, read_rows, text, wanted_tests
from shared.environments.repository import patches
from shared.objects import Objects


def read(path: Path, clones: Clones, objects: Objects) -> Iterator[Found]:
    return read_rows(path, lambda row: _made(row, clones, objects))


def _made(row: dict[str, Any], clones: Clones, objects: Objects) -> Found:
    name, repository, commit = text(row, "instance_id"), text(row, "repo"), text(row, "base_commit")
    fail, others, note = wanted_tests(row)
    touched = {one.new or one.old or "" for one in patches.parse(text(row, "test_patch"))}
    for test in (*fail, *others):
        if why := no_runner(test, touched):  # known before the repository is searched for
            raise Refused(why)
    tree = clones.tree(repository, commit)
    tested = patches.applied(tree, text(row, "test_patch"))
    tests = patches.changes(tree, tested)
    fail, others = located(fail, tests, tested), located(others, tests, tested)
    return finished(
        objects,
        tree,
        name,
        "; ".join(filter(None, (note, clones.note()))),
        public={
            "prompt": text(row, "problem_statement"),
            "cell": repository,
            "origin": f"{repository}@{commit}",
            "commit": commit,
        },
        hidden={
            "fail_to_pass": fail,
            "pass_to_pass": others,
            "tests": tests,
            "protected": kept_tests(fail, others, tests),
            "solution": patches.changes_of(tree, text(row, "patch")),
        },
    )
