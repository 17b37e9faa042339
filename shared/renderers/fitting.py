"""A file of one's own problems, held against the chat format of the policy that shall solve them (docs/problems.md, "What the
small policy can take"). Without this, what cannot be written would be an infrastructure error of every attempt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shared.environments import Outcome, Places
from shared.environments.function.edits import reachable
from shared.environments.registry import Environments, UnknownKind
from shared.problems import FunctionHidden, FunctionProblem, Problem, ProblemError
from shared.problems.importing import Line, listed, read_lines
from shared.renderers import Renderer

SMALL = "compact-1"  # the format of the policy that ships
PAGE = 'docs/problems.md, "What the small policy can take"'
CHECK = 'docs/problems.md, "Admission"'
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Fitting:
    """Accepted and rejected problems of a file. `lines`: the accepted ones, in the order of the file. A reason with line and id for
    each of the others: `refused`: the format cannot write it; `failed`: it did not pass the check in the sandbox. `beyond`: ids of
    accepted problems whose known solution adds, removes or reindents lines; another solution may still work."""

    format: str
    lines: list[Line]
    refused: list[str]
    beyond: list[str]
    failed: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> list[tuple[FunctionProblem, FunctionHidden]]:
        return [(line.problem, line.hidden) for line in self.lines]

    @property
    def without(self) -> int:
        """Return how many problems were rejected."""
        return len(self.refused) + len(self.failed)

    def refusal(self, before: str = "") -> str:
        """Return how many problems were rejected, and why each; empty: none was. `before`: prefix of each kind's line."""
        of = len(self.lines) + self.without
        small = self.format == SMALL
        kinds = (
            (self.refused, f"do not fit {SMALL} ({PAGE})" if small else f"cannot be attempted with {self.format}"),
            (self.failed, f"fail the check in the sandbox ({CHECK})"),
        )
        return "\n".join(
            f"{before}{len(reasons)} of {of} problems {what}:\n{listed(reasons)}" for reasons, what in kinds if reasons
        )

    def left_out(self) -> str:
        """Return `refusal` with 'left out: ' before each kind, for a caller that continues with the accepted problems."""
        return self.refusal("left out: ")

    def unproven(self) -> str:
        """Return how many accepted problems have no known solution; empty: all have one."""
        count = sum(
            not getattr(line.hidden, "solution", True) for line in self.lines
        )  # other kinds may have no such field
        return (
            f"{count} of {len(self.lines)} problems have no field 'solution': nobody knows whether they can be solved; only that "
            "their files fail was seen"
            if count
            else ""
        )

    def doubt(self) -> str:
        """Return which problems the policy may never solve, those of `beyond`; empty: there are none."""
        if not self.beyond:
            return ""
        named = ", ".join(self.beyond[:_NAMED]) + (", …" if len(self.beyond) > _NAMED else "")
        return (
            f"the solution of {len(self.beyond)} of {len(self.lines)} problems adds lines, removes some or reindents them; "
            f"an edit stays within a line, so the policy can solve them only another way: {named}"
        )


def read_fitting(path: Path, format: Renderer) -> Fitting:
    """Read a file of problems and return those that fit. Raises ProblemError with every bad line and its field, as `import_jsonl`
    does, or with the reasons if no problem fits."""
    fitting = fit(read_lines(path), format)
    _require_some(path, fitting)
    return fitting


def fit(lines: Iterable[Line], format: Renderer) -> Fitting:
    """Split the problems into those whose prompt the format can write and those that it cannot."""
    fitting, environments = Fitting(format.name, [], [], []), Environments(Places())
    for line in lines:
        if reason := misfit(line.problem, format, environments):
            fitting.refused.append(_named(line, reason))
            continue
        fitting.lines.append(line)
        if not _solvable_by_edits(line):
            fitting.beyond.append(line.problem.id)
    return fitting


def gated(path: Path, fitting: Fitting, outcomes: Sequence[Outcome], format: Renderer) -> Fitting:
    """Drop problems that failed admission. Check the fit again: admission adds `actual` to the prompt. `outcomes`: one for each of
    `fitting.lines`. Raises ProblemError if none is left."""
    failed = [_named(line, one.reason) for line, one in zip(fitting.lines, outcomes, strict=True) if one.reason]
    passed = [
        replace(line, problem=one.problem, hidden=one.hidden)
        for line, one in zip(fitting.lines, outcomes, strict=True)
        if not one.reason
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


def misfit(problem: Problem, renderer: Renderer, environments: Environments) -> str | None:
    """Return why a policy that speaks by `renderer` cannot attempt the problem: the field, what was found, what is allowed.
    None: it can."""
    try:
        environment = environments.of(problem)
    except UnknownKind as error:
        return str(error)
    return environment.objection(problem) or renderer.objection(environment.brief(problem))


def _solvable_by_edits(line: Line) -> bool:
    """Return whether edits lead to the known solution. True if no solution is known."""
    return not isinstance(line.problem, FunctionProblem) or all(
        reachable(line.problem.files[path], text) for path, text in line.hidden.solution.items()
    )
