"""Admission of problems of several kinds: each kind's own gate, in batches, in the order of the problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.environments import Outcome, admission
from shared.environments.registry import Environments

BATCH = 64
FEW = 4  # of a kind that grades a problem many times, each in a sandbox of its own: seconds to minutes a problem


async def admitted(
    environments: Environments,
    pairs: Sequence[tuple[Any, Any]],
    progress: Callable[[int], None] = lambda done: None,
    batch: int = BATCH,
) -> list[Outcome]:
    """Return one outcome for each problem, in order. `progress`: called with how many are done, after each batch. `batch`: problems
    at a time; of a kind that grades a problem more than once at most `FEW`. Raises UnknownKind, SandboxUnavailable."""
    outcomes: list[Outcome | None] = [None] * len(pairs)
    done = 0
    for kind in dict.fromkeys(problem.kind for problem, _ in pairs):
        places = [place for place, (problem, _) in enumerate(pairs) if problem.kind == kind]
        environment = environments.named(kind)
        size = batch if getattr(environment, "admits_once", False) else min(batch, FEW)
        for start in range(0, len(places), size):
            some = places[start : start + size]
            for place, outcome in zip(some, await environment.admit([pairs[place] for place in some]), strict=True):
                outcomes[place] = outcome
            done += len(some)
            progress(done)
    return [outcome for outcome in outcomes if outcome is not None]


async def thoroughly(
    environments: Environments,
    pairs: Sequence[tuple[Any, Any]],
    progress: Callable[[int], None] = lambda done: None,
    batch: int = BATCH,
) -> list[Outcome]:
    """Return what `admitted` returns. A problem whose kind grades it only once at admission goes through the common gate too,
    which repeats each grading. Raises UnknownKind, SandboxUnavailable, OSError."""
    outcomes = await admitted(environments, pairs, progress, batch)
    again: dict[str, list[int]] = {}
    for place, outcome in enumerate(outcomes):
        kind = outcome.problem.kind
        if not outcome.reason and getattr(environments.named(kind), "admits_once", False):
            again.setdefault(kind, []).append(place)
    for kind, places in again.items():
        graded = [(outcomes[place].problem, outcomes[place].hidden) for place in places]
        for place, outcome in zip(places, await admission.admitted(environments.named(kind), graded), strict=True):
            if outcome.reason:
                outcomes[place] = outcome
    return outcomes
