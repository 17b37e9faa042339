"""Commits of a local git history that change code and tests: the commit before is the tree, the commit's tests are hidden, and its
message is the task, as terse as it is.

Commits that do not change both are no candidates. Merges are left out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

from services.curator.sources.python import Bench, Draft, Rejected, command_of
from services.curator.sources.python.functions import functions
from services.curator.sources.python.laboratory import Run, collected
from services.curator.sources.python.project import Project, SourceError, project_of
from shared.environments.repository import patches, trees
from shared.environments.repository.graders.python_names import wrong_name
from shared.environments.repository.tree_sources import Commit, from_git, history, is_repository, touched
from shared.environments.repository.trees import File, Link, Tree, TreeError

MAX_FAILING, MAX_PASSING = 40, 40  # tests that a problem names
MAX_FILES = 40  # of the solution; a larger change is a release or a move, and its message says little
_COMMITS = 2000  # that are looked at, the newest first
_EACH_S, _WHOLE_S = 5.0, 120.0  # of tests; a slower one names no problem
_TRAILER = re.compile(r"(?i)(signed-off-by|co-authored-by|change-id|reviewed-by|cc|git-svn-id)\s*:.*\Z")


class Commits:
    """See services.curator.sources.python.Source."""

    kind = "commits"
    whole_gate = True

    async def candidates(self, project: Project, bench: Bench) -> AsyncIterator[Draft | Rejected]:
        path = project.path
        if path is None or not path.is_dir() or not is_repository(path):
            raise SourceError(
                f"{project.name}: found no git history in {path or 'what is installed'}; allowed: a clone of its repository"
            )
        found = 0
        try:
            commits = await asyncio.to_thread(history, path, "HEAD", _COMMITS)
            for number, commit in enumerate(commits):
                names = await asyncio.to_thread(touched, path, commit)
                if sum(name.endswith(".py") for name in names) < 2 or not any("test" in name for name in names):
                    continue
                one = await _tried(project, path, bench, commit, bench.folder / f"commit-{number}")
                if one is not None:
                    found += 1
                    yield one
        except TreeError as error:
            raise SourceError(str(error)) from None
        if not found:
            raise SourceError(
                f"{path}: none of {len(commits)} commits changes modules and tests; allowed: a history with such commits (a clone "
                "that is not shallow)"
            )


SOURCE = Commits()


async def _tried(project: Project, path: Path, bench: Bench, commit: Commit, folder: Path) -> Draft | Rejected | None:
    """Return None for a commit that does not change both modules and tests."""
    place = f"{commit.sha[:12]} {commit.message.splitlines()[0] if commit.message else ''}"[:100]
    try:
        before, after = await _at(project, path, commit.parent), await _at(project, path, commit.sha)
        changes = patches.changes(before.tree, after.tree)
    except SourceError:
        return None  # no modules or no tests yet
    except (TreeError, patches.PatchError) as error:
        return Rejected(place, f"cannot be read: {error}")
    tests = {name: one for name, one in changes.items() if _of_tests(name, before, after)}
    solution = {name: one for name, one in changes.items() if name not in tests}
    if not any(name in after.tests for name in tests) or not any(
        name in after.sources or name in before.sources for name in solution
    ):
        return None
    if len(solution) > MAX_FILES:
        return Rejected(
            place, f"too large: it changes {len(solution)} files besides tests; allowed: at most {MAX_FILES}"
        )
    if not (prompt := _prompt(commit.message)):
        return Rejected(place, "no message: nothing says what to do")
    run_in = [name for name in after.tests if name in tests]
    tested = dict(before.tree)
    for name in tests:
        if name in after.tree:
            tested[name] = after.tree[name]
        else:
            tested.pop(name, None)
    try:
        good = await _passing(bench, folder.with_name(f"{folder.name}-after"), after, after.tree, run_in)
    except SourceError as error:
        return Rejected(place, f"its tests cannot be collected: {error}")
    if not good:
        return Rejected(place, "its tests do not pass: none that it changes passes here")
    try:
        bad = await _passing(bench, folder.with_name(f"{folder.name}-before"), before, tested, run_in)
    except (SourceError, TreeError):
        bad = {}
    fail = [name for name in good if name not in bad]
    if not fail:
        return Rejected(place, "no test tells: the commit's tests pass without its change")
    fail, others = fail[:MAX_FAILING], [name for name in good if name in bad][:MAX_PASSING]
    return Draft(
        id=f"c-{commit.sha[:20]}",
        place=place,
        category="commit",
        prompt=prompt,
        tree=before.tree,
        fail_to_pass=tuple(fail),
        pass_to_pass=tuple(others),
        solution=solution,
        tests=tests,
        command=command_of((*fail, *others)),
        code=tuple(_code(before.tree, after.tree, solution)),
        commit=commit.parent,
    )


async def _at(project: Project, path: Path, sha: str) -> Project:
    """Return the project as a commit has it, with the libraries that the user gave. Raises SourceError, TreeError."""
    found = project_of(await asyncio.to_thread(from_git, path, sha), str(path))
    if any(name.startswith("lib/") for name in found.tree):
        return found
    libraries = {name: entry for name, entry in project.tree.items() if name.startswith("lib/")}
    return replace(found, tree={**found.tree, **libraries})


def _of_tests(path: str, before: Project, after: Project) -> bool:
    """Say whether the file belongs to the tests: one of tests, or in a folder of them."""
    folders = {name.rpartition("/")[0] for one in (before, after) for name in one.tests} - {""}
    sources = {*before.sources, *after.sources}
    return path in {*before.tests, *after.tests} or (
        path not in sources and any(path.startswith(f"{folder}/") for folder in folders)
    )


async def _passing(bench: Bench, folder: Path, project: Project, tree: Tree, tests: list[str]) -> dict[str, float]:
    """Return the tests that pass, with their seconds. Raises SourceError, TreeError, SandboxUnavailable."""
    trees.write(tree, folder)
    async with collected(bench.sandboxes, bench.cache, folder, project.sources, tests) as runs:
        run: Run = await runs.run(runs.collected, each_s=_EACH_S, time_s=_WHOLE_S)
    return {test.name: test.seconds for test in run.tests if test.passed and wrong_name(test.name) is None}


def _prompt(message: str) -> str:
    """Return the message without lines that name people or tools."""
    return "\n".join(line for line in message.splitlines() if not _TRAILER.match(line.strip())).strip()


def _code(
    before: Mapping[str, File | Link], after: Mapping[str, File | Link], solution: Mapping[str, object]
) -> list[str]:
    """Return the functions that the solution writes."""
    found = []
    for path in solution:
        if path.endswith(".py"):
            old = {one.text for one in functions(path, trees.texts(before, [path]).get(path, ""))}
            found += [
                one.text for one in functions(path, trees.texts(after, [path]).get(path, "")) if one.text not in old
            ]
    return found
