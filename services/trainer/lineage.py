"""Where a policy version stands relative to the weights in training, and how old a sample is. Pure.

An incarnation continues its parent from a step; what the parent did after it is dead. The age of a token when step t is
made (from the weights of step t - 1) is the distance from t - 1 to the token's version along the tree of incarnations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fork:
    """An incarnation continued `parent` from `step`. parent -1: it began with the base policy, step 0."""

    parent: int
    step: int


def past(forks: Mapping[int, Fork], incarnation: int) -> dict[int, int | None]:
    """The incarnation and its ancestors -> up to which step they belong to its past (None: no end)."""
    path: dict[int, int | None] = {}
    upto: int | None = None
    while incarnation >= 0 and incarnation not in path:
        path[incarnation] = upto
        fork = forks.get(incarnation, Fork(-1, 0))
        upto = fork.step if upto is None else min(upto, fork.step)
        incarnation = fork.parent
    return path


def distance(forks: Mapping[int, Fork], here: tuple[int, int], there: tuple[int, int]) -> int:
    """Steps between two versions, each (incarnation, step), along the tree: back to where they part, then forward.

    On our own line it is the difference of the steps, negative if `there` lies ahead of `here`.
    """
    ours, theirs = past(forks, here[0]), past(forks, there[0])
    common = max((i for i in ours if i in theirs), default=-1)
    ends = [end for end in (ours.get(common), theirs.get(common)) if end is not None]
    part = min(ends) if common >= 0 and ends else None  # None: the same incarnation
    if common < 0:
        part = 0  # nothing in common but the base policy
    if part is None or there[1] <= part:
        return here[1] - there[1]
    return abs(here[1] - part) + there[1] - part  # `there` is on a branch that we are not on, even right at the fork


def age(forks: Mapping[int, Fork], incarnation: int, step: int, version: tuple[int, int]) -> int:
    """Age of a token of `version` (incarnation, step) in the `step`-th step of `incarnation`; 0: sampled by the very
    weights that the step starts from."""
    return distance(forks, (incarnation, step - 1), version)
