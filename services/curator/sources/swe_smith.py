"""SWE-smith: a bug that was put into a repository whose tests pass.

Fields: `instance_id`, `repo` (`swesmith/OWNER__NAME.COMMIT`), `patch`, which makes the bug, `problem_statement`,
`FAIL_TO_PASS`, `PASS_TO_PASS`. As in SWE-smith, the files of the failing tests are not in the tree that the agent sees.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.curator.sources import Found, Refused
from services.curator.sources.clones import Clones
from services.curator.sources.rows import finished, kept_tests, located, read_rows, text, wanted_tests
from shared.environments.repository import patches
from shared.environments.repository.trees import File
from shared.objects import Objects

_MIRROR = re.compile(r"(?:[\w.-]+/)?(?P<owner>[\w-]+?)__(?P<name>[\w.-]+?)\.(?P<commit>[0-9a-f]{7,40})\Z")


def read(path: Path, clones: Clones, objects: Objects) -> Iterator[Found]:
    return read_rows(path, lambda row: _made(row, clones, objects))


def _made(row: dict[str, Any], clones: Clones, objects: Objects) -> Found:
    name, mirror = text(row, "instance_id"), text(row, "repo")
    found = _MIRROR.match(mirror)
    if not found:
        raise Refused(f"field 'repo': found {mirror!r:.80}; allowed: swesmith/OWNER__NAME.COMMIT")
    repository, commit = f"{found['owner']}/{found['name']}", found["commit"]
    fail, others, note = wanted_tests(row)
    good = clones.tree(repository, commit)
    bad = patches.applied(good, text(row, "patch"))
    fail, others = located(fail, (), good), located(others, (), good)
    hidden = {name.partition("::")[0] for name in fail}
    missing = sorted(path for path in hidden if not isinstance(good.get(path), File))
    if missing:
        raise Refused(
            f"field 'FAIL_TO_PASS': found tests of {missing[0]!r:.80}, which {repository}@{commit} does not have"
        )
    tests = {path: patches.change_of(file) for path in sorted(hidden) if isinstance(file := good[path], File)}
    return finished(
        objects,
        {path: entry for path, entry in bad.items() if path not in hidden},
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
            "solution": patches.changes(bad, good),
        },
    )
