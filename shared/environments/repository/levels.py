"""Levels of hardness of repository problems, as tags for the scheduler's estimate: repository, language and size. Pure.

Each level becomes one tag behind the problem's category, e.g. "bugfix/boundary/language-python/size-09".

- Repository: the problems of a repository nearly always share a cell, which the scheduler estimates by itself. Then there is no
  tag, for the same results must not count twice. There is one where the cell is another than the repository.
- Language: the runner of the hidden tests says it.
- Size: lines of the files that the known solution changes, as the power of two that they stay below: "size-09" is 256 to 511.
  An agent has at least to find its way in so many. Without a known solution there is no tag.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem

LANGUAGES = {"pytest": "python", "unittest": "python", "node": "javascript", "go": "go", "cargo": "rust"}
# An origin that names a repository: owner/name, owner/name@commit, https://host/owner/name.git (the host does not count). Others
# name a data set and its row (harbor:task), or a distribution and a place in it (toolz==1.0:toolz/itertoolz.py:take).
_REPOSITORY = re.compile(r"(?:https?://[\w.:-]+/)?(?P<name>[\w.-]+(?:/[\w.-]+)+)/?(?:@[\w.-]+)?\Z")
_NAME_CHARS = 80  # of a repository in its tag, which stands in every message and row of the problem


def levels(problem: RepositoryProblem, hidden: RepositoryHidden) -> list[str]:
    """Return the tags of one problem, in the order repository, language, size."""
    found = [f"language-{LANGUAGES[hidden.runner]}"]
    named = _REPOSITORY.match(problem.origin)
    if named and (repository := named["name"].removesuffix(".git")) != problem.cell:
        found.insert(0, f"repository-{repository.replace('/', ':')[-_NAME_CHARS:]}")
    lines = sum(len(change.text.splitlines()) for change in hidden.solution.values() if change.text)
    if lines:
        found.append(f"size-{lines.bit_length():02d}")
    return found
