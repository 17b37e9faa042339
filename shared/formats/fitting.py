"""A file of one's own problems, held against the chat format of the policy that shall solve them (docs/problems.md, "What the
small policy can take"). Without this, what cannot be written would be an infrastructure error of every attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shared.formats import Format
from shared.formats.edits import reachable
from shared.problems import Hidden, Problem, ProblemError
from shared.problems.importing import Line, listed, read_lines
from shared.sandbox.gate import Outcome

PAGE = 'docs/problems.md, "What the small policy can take"'
CHECK = 'docs/problems.md, "Admission"'
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Fitting:
    """`lines`: what is left, in the order of the file. Of every other one its line, id and what is wrong: `refused`, what the
    format cannot take; `failed`, what did not pass the check in the sandbox. `beyond`: ids of those left whose solution no edits
    lead to."""

    format: str
    lines: list[Line]
    refused: list[str]
    beyond: list[str]
    failed: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[Problem, Hidden]]:
        return [(line.problem, line.hidden) for line in self.lines]

    @property
    def without(self) -> int:
        """How many are not left."""
        return len(self.refused) + len(self.failed)

    def refusal(self, before: str = "") -> str:
        """How many are not left, and why each; empty where all are. `before`: what goes before each kind."""
        of = len(self.lines) + self.without
        kinds = (
            (self.refused, f"do not fit {self.format} ({PAGE})"),
            (self.failed, f"fail the check in the sandbox ({CHECK})"),
        )
        return "\n".join(
            f"{before}{len(reasons)} of {of} problems {what}:\n{listed(reasons)}" for reasons, what in kinds if reasons
        )

    def left_out(self) -> str:
        """The same, for who goes on with the others."""
        return self.refusal("left out: ")

    def unproven(self) -> str:
        """How many may have no solution at all; empty where all have one."""
        count = sum(not line.hidden.solution for line in self.lines)
        return (
            f"{count} of {len(self.lines)} problems have no field 'solution': nobody knows whether they can be solved; only that "
            "their files fail was seen"
            if count
            else ""
        )

    def doubt(self) -> str:
        """Which ones may never be solved; empty where there is no doubt."""
        if not self.beyond:
            return ""
        named = ", ".join(self.beyond[:_NAMED]) + (", …" if len(self.beyond) > _NAMED else "")
        return (
            f"the solution of {len(self.beyond)} of {len(self.lines)} problems adds lines, removes some or indents them anew; "
            f"an edit stays within a line, so the policy can solve them only another way: {named}"
        )


def read_fitting(path: Path, format: Format) -> Fitting:
    """Raises ProblemError: every bad line and its field, as `import_jsonl`; or that no problem fits, and why."""
    fitting = fit(read_lines(path), format)
    _require_some(path, fitting)
    return fitting


def fit(lines: Iterable[Line], format: Format) -> Fitting:
    """Those whose prompt the format can write."""
    fitting = Fitting(format.name, [], [], [])
    for line in lines:
        if reason := format.objection(line.problem):
            fitting.refused.append(_named(line, reason))
            continue
        fitting.lines.append(line)
        if not _solvable_by_edits(line):
            fitting.beyond.append(line.problem.id)
    return fitting


def gated(path: Path, fitting: Fitting, outcomes: Sequence[Outcome], format: Format) -> Fitting:
    """Of those left the ones that have passed, with what their files give (`actual`), which is a part of their prompt: the format
    is asked once more. `outcomes`: one each. Raises ProblemError where none is left."""
    failed = [_named(line, one.reason) for line, one in zip(fitting.lines, outcomes, strict=True) if one.reason]
    passed = [
        replace(line, problem=one.problem) for line, one in zip(fitting.lines, outcomes, strict=True) if not one.reason
    ]
    again = fit(passed, format)
    left = replace(again, refused=[*fitting.refused, *again.refused], failed=failed)
    _require_some(path, left)
    return left


def _require_some(path: Path, fitting: Fitting) -> None:
    if not fitting.lines:
        raise ProblemError(f"{path}: {fitting.refusal()}")


def _named(line: Line, reason: str) -> str:
    where = f"line {line.number}: " if line.number else ""
    return f"{where}problem {line.problem.id!r}: {reason}"


def _solvable_by_edits(line: Line) -> bool:
    """As far as anybody knows: without a solution nobody does."""
    return all(reachable(line.problem.files[path], text) for path, text in line.hidden.solution.items())
