"""Policy: which paths a submission cannot change. Changes to them are ignored and named in the verdict.

- Files of the hidden tests, and of tests that are named in the problem.
- Everything below a test folder that holds one of them, unless the known solution changes other files there.
- Files that decide how the tests run (`Runner.infrastructure`), in any folder: they stay as the base commit has them.
- Files that decide how the project is built (`Runner.builds`), unless the known solution changes the same file.
- Stored outputs that tests compare with (`_STORED`), in any folder, unless the known solution changes the same file.
- Folders of such files with a name that sources may have, too (`_STORED_BESIDE`): beside a test file or in a folder above it,
  unless the known solution changes a file in it.
- The problem's own patterns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from shared.contracts.trajectory import Change
from shared.environments.repository.graders import Runner
from shared.environments.repository.graders.python_names import INFRASTRUCTURE
from shared.environments.repository.problem import RepositoryHidden

_TEST_FOLDERS = frozenset({"test", "tests", "testing", "__tests__", "spec"})
_STORED = ("testdata", "__snapshots__", "*.golden", "*.snap")  # of Go, Jest, insta
_STORED_BESIDE = frozenset({"fixtures", "snapshots"})


@dataclass(frozen=True, slots=True)
class Protection:
    """`tests`: paths of test files. `folders`: everything below them. `parts`: patterns of one part of a path. `builds`: the same,
    but paths of `solved` are free. `patterns`: the problem's own globs of whole paths."""

    tests: frozenset[str]
    folders: frozenset[str]
    parts: tuple[str, ...]
    builds: tuple[str, ...]
    solved: frozenset[str]
    patterns: tuple[str, ...]

    def covers(self, path: str) -> bool:
        pure = PurePosixPath(path)
        names = [part.casefold() for part in pure.parts]
        return (
            path in self.tests
            or _any(names, self.parts)
            or (path not in self.solved and _any(names, self.builds))
            or (path not in self.solved and _any(names, _STORED))
            or any(self._stored_beside(parent) for parent in pure.parents)
            or any(str(parent) in self.folders for parent in pure.parents)
            or any(fnmatchcase(path, pattern) for pattern in self.patterns)
        )

    def _stored_beside(self, folder: PurePosixPath) -> bool:
        """Say whether the folder holds what a test near it compares with, and the known solution changes nothing in it."""
        return (
            folder.name.casefold() in _STORED_BESIDE
            and any(folder.parent in PurePosixPath(test).parents for test in self.tests)
            and not any(folder in PurePosixPath(path).parents for path in self.solved)
        )


def _any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def protection(hidden: RepositoryHidden, runner: Runner) -> Protection:
    """Return the paths that a submission cannot change."""
    names = (*hidden.fail_to_pass, *hidden.pass_to_pass)
    tests = {*hidden.tests, *(path for name in names if (path := runner.file_of(name, hidden)))}
    folders = {str(parent) for path in tests for parent in PurePosixPath(path).parents if parent.name in _TEST_FOLDERS}
    folders -= {str(parent) for path in hidden.solution for parent in PurePosixPath(path).parents if path not in tests}
    return Protection(
        frozenset(tests),
        frozenset(folders),
        _folded((*INFRASTRUCTURE, *runner.infrastructure)),  # tests of any language may start Python
        _folded(runner.builds),
        frozenset(hidden.solution),
        tuple(hidden.protected),
    )


def _folded(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the patterns as they match names without regard to case."""
    return tuple(dict.fromkeys(pattern.casefold() for pattern in patterns))


def split(
    changes: Mapping[str, Change], hidden: RepositoryHidden, runner: Runner
) -> tuple[dict[str, Change], tuple[str, ...]]:
    """Return the changes that are applied, and the paths of the others."""
    guard = protection(hidden, runner)
    ignored = tuple(sorted(path for path in changes if guard.covers(path)))
    return {path: change for path, change in changes.items() if path not in ignored}, ignored
