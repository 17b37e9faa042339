"""Whether made problems share code with evaluation sets: by the repository's name, and by functions that are near-copies."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.curator import check
from services.curator.sources.python.functions import functions
from services.curator.sources.python.project import Project, SourceError
from services.curator.sources.rows import rows_of
from shared.problems import ProblemError
from shared.problems.signatures import Signatures, fingerprint

_LEAST_LINES = 3  # of a function; shorter ones are alike by chance


def marks(text: str) -> Iterator[tuple[str, bytes]]:
    """Yield the fingerprint of a function that is long enough to be recognised."""
    if len(text.strip().splitlines()) >= _LEAST_LINES:
        try:
            yield fingerprint(textwrap.dedent(text))
        except (SyntaxError, ValueError, RecursionError):
            return


@dataclass(slots=True)
class Evaluations:
    """`sets`: path -> what was read of it. `repositories`: names, in lower case and without their owner."""

    sets: dict[str, dict[str, int]] = field(default_factory=dict)
    repositories: dict[str, str] = field(default_factory=dict)
    dropped: int = 0
    _known: Signatures = field(default_factory=Signatures)

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Evaluations:
        """Read packs, files of problems, or rows of the SWE-bench family. Raises ProblemError, OSError, KeyError."""
        found = cls()
        for path in paths:
            found._add(path)
        return found

    def require_other(self, project: Project) -> None:
        """Raise SourceError where an evaluation set has problems of this repository: any tree of it would show solutions."""
        if (path := self.repositories.get(_plain(project.name))) is not None:
            raise SourceError(
                f"{project.name}: {path} has problems of the same repository; allowed: projects that no set of --against holds"
            )

    def objection(self, code: Iterable[str]) -> str:
        """Return why a candidate that writes these functions is dropped; empty: it is not."""
        if any(self._known.has_near(*mark) for text in code for mark in marks(text)):
            self.dropped += 1
            return "contaminated: an evaluation set has a function that is nearly the same"
        return ""

    def report(self) -> dict[str, Any]:
        return {"against": self.sets, "repositories": sorted(self.repositories), "dropped": self.dropped}

    def _add(self, path: Path) -> None:
        before = len(self._known)
        try:
            pairs = check.read(path)
        except ProblemError:
            if path.is_dir():
                raise
            pairs = []
        for problem, hidden in pairs:
            self._add_name(problem.repository, path)
            for file, change in getattr(hidden, "solution", {}).items():
                text = change if isinstance(change, str) else change.text
                for one in functions(file, text or ""):
                    for mark in marks(one.text):
                        self._known.add(*mark)
        rows = [row for _, row in rows_of(path)] if not pairs and not path.is_dir() else []
        if rows and not any("repo" in row for row in rows):
            raise ProblemError(f"--against {path}: found neither problems nor rows with a field 'repo'")
        for row in rows:
            self._add_name(str(row.get("repo", "")), path)
        self.sets[str(path)] = {"problems": len(pairs) or len(rows), "functions": len(self._known) - before}

    def _add_name(self, name: str, path: Path) -> None:
        if _plain(name):
            self.repositories.setdefault(_plain(name), str(path))


def _plain(name: str) -> str:
    """Return `more-itertools` for `more-itertools/more_itertools`."""
    return re.sub(r"[-_.]+", "-", name.rstrip("/").rpartition("/")[2].removesuffix(".git")).lower()
