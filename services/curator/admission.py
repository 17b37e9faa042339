"""Batches of admitted problems and of refusals. Pure: the same run gives the same messages in the same order."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence

from shared.contracts.messages import Alert, ProblemAdmitted
from shared.contracts.run import RunConfig
from shared.problems.schema import Problem

_BATCH_BYTES = 48 * 1024  # of 64 KiB that a message may have
_PER_PROBLEM = 12  # quotes, brackets and commas around id, category and cell
# Nats. Narrow where attempts of a group differ most; beyond the last, hardly anything is ever solved.
BANDS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0)
_EXAMPLES = 20
_EXAMPLE_CHARS = 400


def category(problem: Problem, nats: float | None) -> str:
    """What the hardness estimate counts the problem among: the pack's category, and its band of surprise as one tag more."""
    return problem.category if nats is None else f"{problem.category}/surprise-{bisect(BANDS, nats):02d}"


def admitted(
    config: RunConfig, problems: Sequence[Problem], surprise: Mapping[str, float] | None = None
) -> Iterator[ProblemAdmitted]:
    """`surprise`: problem id -> nats, for the problems of which it is known."""
    batch: dict[str, tuple[str, str]] = {}
    size = 0
    for problem in problems:
        among = category(problem, (surprise or {}).get(problem.id))
        own = _PER_PROBLEM + sum(len(text.encode()) for text in (problem.id, among, problem.cell))
        if batch and size + own > _BATCH_BYTES:
            yield _message(config, batch)
            batch, size = {}, 0
        batch[problem.id] = (among, problem.cell or problem.id)
        size += own + (0 if problem.cell else len(problem.id))
    if batch:
        yield _message(config, batch)


def _message(config: RunConfig, batch: dict[str, tuple[str, str]]) -> ProblemAdmitted:
    return ProblemAdmitted(run=config.run, pack=config.pack, pack_hidden=config.pack_hidden, problems=batch)


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
