"""Which tests of a tree pass, as the graders of repository problems see it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared.contracts.run import Ref
from shared.contracts.trajectory import Submission
from shared.environments.repository import grading, trees
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.repository.trees import Tree
from shared.sandbox import open_sandboxes
from shared.sandbox.contract import WORKSPACE

_NOWHERE = Ref(key="trees/none", size=0, checksum="")


def passing(tree: Tree, files: Sequence[str], cache: Path) -> set[str]:
    """Return the names of tests that pass; empty where pytest ended early."""
    return asyncio.run(_passing(tree, files, cache))


async def _passing(tree: Tree, files: Sequence[str], cache: Path) -> set[str]:
    problem = RepositoryProblem(id="any", prompt="any", tree=_NOWHERE)
    hidden = RepositoryHidden(
        id="any", fail_to_pass=[f"{files[0]}::test_any"], command=[f"{WORKSPACE}/{path}" for path in files]
    )
    with tempfile.TemporaryDirectory(prefix="etude-tree-") as name:
        folder = Path(name, "tree")
        trees.write(tree, folder)
        sandboxes = open_sandboxes("bubblewrap")
        try:
            _, report = await grading.graded(sandboxes, cache, folder, problem, hidden, Submission())
        finally:
            await sandboxes.close()
    return set() if report.wrong else set(report.passed)
