"""Sources of repository problems that are made of any Python project with tests, instead of imported from a data set.

A source looks at a project and yields candidates, each a draft of a problem or a rejection with its reason. `making` gates
the drafts and writes the pack. Other packages add a source by an entry point of the group `etude.makers`.

Invariants:
- Code of the project, its tests included, runs only in sandboxes without network.
- A draft becomes a problem only after the real grader has solved it with the solution and not without it.
- Every candidate is counted once: admitted, or rejected with the reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shared.contracts.trajectory import Change
from shared.environments.repository.graders.python_names import file_of
from shared.environments.repository.trees import Tree
from shared.plugins import Plugins, UnknownName
from shared.sandbox.contract import WORKSPACE

if TYPE_CHECKING:
    from services.curator.sources.python.project import Project
    from shared.sandbox.contract import Sandboxes


@dataclass(frozen=True, slots=True)
class Draft:
    """A candidate that passed its source's own look. `place`: where it lies, e.g. "toolz/itertoolz.py:take". `tree`: as the agent
    sees it. `command`: what the runner is told to run; empty: the files of the named tests. `code`: texts of functions that the
    solution writes, for the search for copies. `commit`: of the tree; empty: none."""

    id: str
    place: str
    category: str
    prompt: str
    tree: Tree
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    solution: Mapping[str, Change]
    tests: Mapping[str, Change] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    commit: str = ""


def command_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return what pytest is told so that it runs the named tests. Assertions stay as they are written: rewriting those of a large
    file of tests for messages that no verdict needs takes longer than the tests."""
    return ("--assert=plain", *(f"{WORKSPACE}/{name}" for name in names))


def kept_by_file(first: Iterable[str], others: Iterable[str], most: int) -> list[str]:
    """Return at most so many of the others. Those whose file holds one of the first come first: each further file of tests is
    imported in every grading."""
    files = {file_of(name) for name in first}
    return sorted(others, key=lambda name: file_of(name) not in files)[:most]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that makes no problem. `reason`: starts with a few words that are the same for all of a kind, then a colon where
    there is more to say."""

    place: str
    reason: str


@dataclass(frozen=True, slots=True)
class Bench:
    """What a source works with. `folder`: for files of its own, removed at the end. `notes`: what a person should know of the
    project; sources add to it."""

    sandboxes: Sandboxes
    cache: Path
    folder: Path
    seed: str = "0"
    notes: list[str] = field(default_factory=list)


class Source(Protocol):
    """`kind`: the name of the source. `whole_gate`: every draft gets the whole gate, not only a sample."""

    kind: str
    whole_gate: bool

    def candidates(self, project: Project, bench: Bench) -> AsyncIterator[Draft | Rejected]:
        """Yield candidates, the best first; the caller may stop early. Raises SourceError where the project cannot be used,
        SandboxUnavailable."""
        ...


PLUGINS = Plugins("etude.makers", {name: f"{__name__}.{name}:SOURCE" for name in ("mutations", "deletions", "commits")})


def names() -> list[str]:
    """Return the names of all sources, without loading any."""
    return PLUGINS.names()


def named(name: str) -> Source:
    """Return a source. Raises ValueError that says which ones there are."""
    try:
        source: Source = PLUGINS.load(name)
    except UnknownName:
        raise ValueError(f"--kind: found {name!r:.80}; allowed: {', '.join(names())}") from None
    return source
