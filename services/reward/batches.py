"""Submissions graded together, where one of them may break the sandboxes. Blocking.

Invariant: a submission that cannot be graded takes no other along, and its answer is a reason, never a verdict.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from shared.contracts.messages import Verdict
from shared.environments import Grading, Ungradable
from shared.environments.answering import require_one_each
from shared.environments.registry import Environments

log = structlog.get_logger()


def graded_together(environments: Environments, kind: str, gradings: Sequence[Grading]) -> list[Verdict | str]:
    """Return a verdict for each submission, or the reason why infrastructure kept it from being graded.

    Where grading fails although sandboxes work, each half is graded alone. Raises SandboxUnavailable where no sandbox works.
    """
    try:
        verdicts = asyncio.run(environments.named(kind).grade(gradings))
        require_one_each(gradings, verdicts, f"verdicts of environment {kind!r}")
    except Exception as error:  # whatever one of them brings about
        asyncio.run(environments.check())
        if gone := _unavailable(environments, kind):
            return [gone] * len(gradings)
        reason = f"{type(error).__name__}: {error}"
        log.warning("sandbox_broken", problems=[grading.problem.id for grading in gradings], error=reason)
        if len(gradings) == 1:
            return [reason]
        half = len(gradings) // 2
        first, second = gradings[:half], gradings[half:]
        return graded_together(environments, kind, first) + graded_together(environments, kind, second)
    return [f"Ungradable: {each.reason}" if isinstance(each, Ungradable) else each for each in verdicts]


def _unavailable(environments: Environments, kind: str) -> str | None:
    """Return why no sandbox of the kind works here although one of functions does. None: one works. An environment of another
    package may raise anything."""
    try:
        asyncio.run(environments.check(kind))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
