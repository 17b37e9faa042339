"""Sources of repository problems: data sets of others, read row by row. A row becomes a problem, or is refused with the reason.

A source is a function `read(path, clones, objects)`. Other packages add theirs by an entry point of the group
`etude.sources`, whose name is the name of the source.

Invariants:
- A source drops only names of PASS_TO_PASS that the data set has truncated, and the content of git submodules and
  of files in Git LFS; the note says so. Any
  other part that this machine cannot use (an image, a language without a runner) refuses the row with the reason.
- No source reaches the network. Repositories come from a folder of clones, bundles and archives (`Clones`).
- No history goes into a tree, and nothing that a test patch adds. Test files that exist already stay; a submission cannot change
  those that hold a named test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.curator.sources.clones import Clones
from shared.objects import Objects
from shared.plugins import Plugins, UnknownName


class Refused(ValueError):
    """The row cannot become a problem here; the text says why, and the way out where there is one."""


@dataclass(frozen=True, slots=True)
class Found:
    """One row. `row`: its id, or its line. `problem`, `hidden`: None where it is refused. `note`: the reason of a refusal, or
    what a person should know of an imported row; empty: nothing."""

    row: str
    problem: Any = None
    hidden: Any = None
    note: str = ""


Read = Callable[[Path, Clones, Objects], Iterator[Found]]


# SWE-Gym and SWE-bench Multilingual have the fields of SWE-bench.
PLUGINS = Plugins(
    "etude.sources",
    {
        name: f"{__name__}.{module}:read"
        for name, module in {
            "harbor": "harbor",
            "harbor-steps": "harbor_steps",
            "r2e-gym": "r2e_gym",
            "swe-bench": "swe_bench",
            "swe-bench-multilingual": "swe_bench",
            "swe-gym": "swe_bench",
            "swe-smith": "swe_smith",
            "verifiers": "verifiers",
        }.items()
    },
)


def names() -> list[str]:
    """Return the names of all sources, without loading any."""
    return PLUGINS.names()


def named(name: str) -> Read:
    """Return a source. Raises ValueError that says which ones there are."""
    try:
        read: Read = PLUGINS.load(name)
    except UnknownName:
        raise ValueError(f"found source {name!r:.80}; allowed: {', '.join(names())}") from None
    return read
