"""A file of one's own problems, held against the chat format of the policy that shall solve them (docs/problems.md, "What the
small policy can take"). Without this, what cannot be written would be an infrastructure error of every attempt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.formats import Format
from shared.formats.edits import reachable
from shared.problems import Hidden, Problem, ProblemError
from shared.problems.importing import Line, listed, read_lines

PAGE = 'docs/problems.md, "What the small policy can take"'
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Fitting:
    """`pairs`: what the format can take, in the order of the file. `refused`: of every other one its line, id, field, what was
    found and what is allowed. `beyond`: ids of those pairs whose solution no edits lead to."""

    format: str
    pairs: list[tuple[Problem, Hidden]]
    refused: list[str]
    beyond: list[str]

    def refusal(self) -> str:
        """How many do not fit, and why each; empty where all do."""
        if not self.refused:
            return ""
        of = len(self.pairs) + len(self.refused)
        return f"{len(self.refused)} of {of} problems do not fit {self.format} ({PAGE}):\n{listed(self.refused)}"

    def left_out(self) -> str:
        """The same, for who goes on with the others."""
        return f"left out: {self.refusal()}" if self.refused else ""

    def doubt(self) -> str:
        """Which ones may never be solved; empty where there is no doubt."""
        if not self.beyond:
            return ""
        named = ", ".join(self.beyond[:_NAMED]) + (", …" if len(self.beyond) > _NAMED else "")
        return (
            f"the solution of {len(self.beyond)} of {len(self.pairs)} problems adds lines, removes some or indents them anew; "
            f"an edit stays within a line, so the policy can solve them only another way: {named}"
        )


def read_fitting(path: Path, format: Format) -> Fitting:
    """Raises ProblemError: every bad line and its field, as `import_jsonl`; or that no problem fits, and why."""
    pairs: list[tuple[Problem, Hidden]] = []
    refused: list[str] = []
    beyond: list[str] = []
    for line in read_lines(path):
        if reason := format.objection(line.problem):
            refused.append(f"line {line.number}: problem {line.problem.id!r}: {reason}")
            continue
        pairs.append((line.problem, line.hidden))
        if not _solvable_by_edits(line):
            beyond.append(line.problem.id)
    fitting = Fitting(format.name, pairs, refused, beyond)
    if not pairs:
        raise ProblemError(f"{path}: {fitting.refusal()}")
    return fitting


def _solvable_by_edits(line: Line) -> bool:
    """As far as anybody knows: without a solution nobody does."""
    return all(reachable(line.problem.files[path], text) for path, text in line.hidden.solution.items())
