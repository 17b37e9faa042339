"""`etude tasks check`: the admission of problems, with the evidence against those that it refuses.

A solution must score 1, no change and every cheat of the kind must score 0, and three gradings must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from services.curator import own
from shared.environments import Outcome
from shared.environments.admitting import thoroughly
from shared.environments.places import places_of_files
from shared.environments.registry import Environments
from shared.problems import Hidden, Problem
from shared.problems.pack import Lines, file_name, splits_in
from shared.settings import ServiceSettings
from shared.settings import read as read_settings
from shared.visible import visible

_BATCH = 4  # problems between two steps of the progress bar
_ROWS = 200  # shown one by one; of more only those that are not admitted


@dataclass(frozen=True, slots=True)
class Checked:
    """One problem's admission. `outcome`: "admitted", "unproven" (admitted, but no solution is known) or "quarantined".
    `by`: the submission whose grading refused it; empty: no grading did. `evidence`: what was seen; empty: nothing is wrong."""

    id: str
    kind: str
    outcome: str
    by: str
    evidence: str


def read(path: Path) -> list[tuple[Any, Any]]:
    """Return the problems of a file or of a pack's folder. Raises ProblemError, OSError, and KeyError for a problem of a pack
    without its hidden part."""
    if not path.is_dir():
        return [(line.problem, line.hidden) for line in own.from_file(path).lines]
    pairs: list[tuple[Any, Any]] = []
    for split in splits_in(path):
        public = Lines((path / file_name(split, "public")).read_bytes(), Problem)
        hidden = Lines((path / file_name(split, "hidden")).read_bytes(), Hidden)
        pairs += [(problem, hidden[problem.id]) for problem in public]
    return pairs


async def checked(pairs: Sequence[tuple[Any, Any]], sandbox: str, progress: Callable[[int], None]) -> list[Checked]:
    """Return one answer for each problem, in order. Raises SandboxUnavailable, UnknownKind, OSError."""
    async with places_of_files(read_settings(ServiceSettings), 2, sandbox) as places:
        return list(map(_row, await thoroughly(Environments(places), pairs, progress, _BATCH)))


def _row(found: Outcome) -> Checked:
    outcome = "quarantined" if found.reason else "admitted" if found.proven else "unproven"
    return Checked(found.problem.id, found.problem.kind, outcome, found.refused_by, found.reason)


def table(rows: Sequence[Checked]) -> Table:
    """Return a line for each problem; of many only those that are not admitted."""
    good = sum(row.outcome != "quarantined" for row in rows)
    shown = Table("problem", "kind", "outcome", "by", "evidence", title=f"{good} of {len(rows)} problems admitted")
    for row in rows:
        if row.outcome != "admitted" or len(rows) <= _ROWS:
            shown.add_row(visible(row.id), row.kind, row.outcome, visible(row.by), visible(row.evidence))
    return shown
