"""Batches of admitted problems and of refusals. Pure: the same run gives the same messages in the same order."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shared.contracts.messages import Alert, ProblemAdmitted
from shared.contracts.run import RunConfig
from shared.problems.schema import Problem

_BATCH_BYTES = 48 * 1024  # of 64 KiB that a message may have
_PER_PROBED = 24  # two numbers
_PER_PROBLEM = 12  # quotes, brackets and commas around id, category and cell
# Nats. Narrow where attempts of a group differ most; beyond the last, hardly anything is ever solved.
BANDS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)
_EXAMPLES = 20
_EXAMPLE_CHARS = 400


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of problems before the run, by id; nothing is known of those that are left out.

    `surprise`: nats. `levels`: tags (`Problem.levels`). `probed`: attempts that a probe made, and how many of them were
    solved."""

    surprise: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    probed: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def admitted(config: RunConfig, problems: Sequence[Problem], known: Known = Known()) -> Iterator[ProblemAdmitted]:
    batch: list[Problem] = []
    size = 0
    for problem in problems:
        own = _bytes(problem, known)
        if batch and size + own > _BATCH_BYTES:
            yield _message(config, batch, known)
            batch, size = [], 0
        batch.append(problem)
        size += own
    if batch:
        yield _message(config, batch, known)


def _bytes(problem: Problem, known: Known) -> int:
    """Return how much room a problem takes in a message, at most."""
    names = (problem.id, _category(problem, known), problem.cell or problem.id)
    again = _PER_PROBLEM + _PER_PROBED + len(problem.id.encode()) if problem.id in known.probed else 0
    return _PER_PROBLEM + sum(len(text.encode()) for text in names) + again


def _category(problem: Problem, known: Known) -> str:
    """Return what the hardness estimate counts the problem among: the pack's category, then a tag for each of its levels and one
    for its band of surprise."""
    tags = list(known.levels.get(problem.id, ()))
    if problem.id in known.surprise:
        tags.append(f"surprise-{bisect(BANDS, known.surprise[problem.id]):02d}")
    return "/".join((problem.category, *tags))


def _message(config: RunConfig, batch: Sequence[Problem], known: Known) -> ProblemAdmitted:
    return ProblemAdmitted(
        run=config.run,
        pack=config.pack,
        pack_hidden=config.pack_hidden,
        problems={problem.id: (_category(problem, known), problem.cell or problem.id) for problem in batch},
        probed={problem.id: known.probed[problem.id] for problem in batch if problem.id in known.probed},
    )


def refused(run: str, reasons: dict[str, str], of: int) -> Alert:
    """`reasons`: problem id → why."""
    return Alert(
        run=run,
        name="problems_refused",
        severity="critical" if len(reasons) == of else "warning",
        what=f"{len(reasons)} of {of} problems did not pass the gate",
        examples=[f"{name}: {reason}"[:_EXAMPLE_CHARS] for name, reason in list(reasons.items())[:_EXAMPLES]],
    )


def unproven(run: str, problems: Sequence[str], of: int) -> Alert:
    return Alert(
        run=run,
        name="problems_unproven",
        severity="info",
        what=f"{len(problems)} of {of} problems bring no solution: nobody knows whether they can be solved",
        examples=[name[:_EXAMPLE_CHARS] for name in problems[:_EXAMPLES]],
    )


def unusable(run: str, reason: str) -> Alert:
    return Alert(run=run, name="pack_unusable", severity="critical", what=reason[:2000])
