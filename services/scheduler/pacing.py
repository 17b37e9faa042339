"""How far ahead of the trainer groups are asked for: enough to keep it busy, and few, since each that waits grows old. Pure.

By Little's law a trainer that takes `groups_per_step` groups every `step_s` seconds needs so many groups in flight:

    flying = groups_per_step × mean seconds from asking for a group to its last verdict / step_s

A step's groups must be complete when it begins, and those of the next when that one begins: two steps' groups more. How many of
those in flight are complete then varies about as a Poisson number does: two standard deviations more. With less the trainer
waits in the simulation (`benchmarks.async_simulation`, docs/architecture.md). Samples are older for it: in the second and fourth
fleet as old as without `lead`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from services.scheduler.life import step_seconds

LATENCIES = 64  # groups whose latency is remembered


def lead(latencies_s: Sequence[float], step_s: float | None, *, groups_per_step: int, max_staleness: int) -> int:
    """Return how many groups may be asked for beyond those of the step that trains from the present version: two steps' or more,
    so that sampling overlaps training, but never more than the bound allows. While nothing is measured: all that the bound
    allows.

    `latencies_s`: of groups completed last. `step_s`: of the trainer's computing in one step; None: no step was made."""
    most = max_staleness * groups_per_step
    if not latencies_s or not step_s:
        return most
    steps = statistics.fmean(min(latency / step_s, max_staleness) for latency in latencies_s)
    flying = steps * groups_per_step
    return min(most, math.ceil(flying + 2 * groups_per_step + 2 * math.sqrt(flying)))


def training_seconds(reported: Sequence[float], commits: Sequence[float]) -> float | None:
    """Return how long the trainer computes in one step. `reported`: what it said of its last steps. If it reported
    nothing: the shortest time between its last `commits`, which is closest to a step without waiting. None: not known."""
    if reported:
        return statistics.median(reported)
    return min(step_seconds(commits), default=None)
