"""What a simulated fleet did, in the figures by which rules of pacing are compared. Pure.

The first steps are left out (`warm_up`): the fleet begins empty. Of what is left:
- idle trainer, idle slots: shares of the time.
- idle limit: the share of the time that the trainer had to be idle under every rule that keeps the bound and throws nothing away,
  given when attempts began. One of the version of step v is trained in step v + bound + 1 at the latest, which begins after it has
  ended; meanwhile the trainer makes at most `bound` steps. Of attempts that overlap, one counts.
- discarded: the share of the sampled seconds that was thrown away, of all that was trained or thrown away.
- bias: the mean seconds of a trained group over those of all that were opened in the same time, less one. 0: long groups are
  as often in the data as they are among the problems. A group that is still running at the end is in neither.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from services.scheduler.simulation.fleet import Fleet, History


@dataclass(frozen=True, slots=True)
class Measures:
    """Shares from 0 to 1. `groups_per_hour`: trained. Ages in steps. `bias_error`: the standard error of `bias`."""

    rule: str
    trainer_idle: float
    idle_limit: float
    slots_idle: float
    groups_per_hour: float
    discarded: float
    age_mean: float
    age_max: int
    too_old: int  # groups trained above the bound
    bias: float
    bias_error: float


def measure(rule: str, fleet: Fleet, history: History, *, warm_up: int) -> Measures:
    """Raises ValueError where fewer than two steps are left after the first `warm_up`, or the fleet got stuck."""
    if history.stuck:
        raise ValueError(f"{rule}: {history.stuck}")
    steps = history.steps[warm_up:]
    if warm_up < 1 or len(steps) < 2:
        raise ValueError(f"warm_up: found {warm_up} of {len(history.steps)} steps; allowed: 1 to all but two")
    since, upto = history.steps[warm_up - 1].ended_at, steps[-1].ended_at
    seconds = np.asarray(history.opened)
    trained = [group for step in steps for group in step.groups]
    thrown = [group for at, group in history.discarded if since < at <= upto]
    ages = np.asarray([age for step in steps for age in step.ages])
    sampled = seconds[trained].sum() + seconds[thrown].sum()
    bias, error = _bias(fleet, history, since)
    return Measures(
        rule=rule,
        trainer_idle=1 - sum(step.ended_at - step.began_at for step in steps) / (upto - since),
        idle_limit=_limit(fleet, history, since, upto),
        slots_idle=1 - _busy(history, since, upto) / (fleet.slots * (upto - since)),
        groups_per_hour=3600 * len(trained) / (upto - since),
        discarded=float(seconds[thrown].sum() / sampled),
        age_mean=float(ages.mean()),
        age_max=int(ages.max()),
        too_old=int((ages > fleet.max_staleness).sum()),
        bias=bias,
        bias_error=error,
    )


def _busy(history: History, since: float, upto: float) -> float:
    """Seconds of slots in use between the two times."""
    points = [*history.busy, (upto, 0)]
    return sum(n * max(0.0, min(b, upto) - max(a, since)) for (a, n), (b, _) in pairwise(points))


def _limit(fleet: Fleet, history: History, since: float, upto: float) -> float:
    """Share of the time. The greatest sum over attempts that do not overlap, by the usual recursion over their ends."""
    allowed_s = fleet.max_staleness * fleet.step_s
    long = sorted(
        (end, begun) for begun, end in history.spans if end - begun > allowed_s and since <= begun and end <= upto
    )
    ends, sums = [since], [0.0]
    for end, begun in long:
        before = sums[bisect_right(ends, begun) - 1]
        ends.append(end)
        sums.append(max(sums[-1], before + end - begun - allowed_s))
    return sums[-1] / (upto - since)


def _bias(fleet: Fleet, history: History, since: float) -> tuple[float, float]:
    """Of the groups that were opened after `since`, and so early that each had the time to be trained."""
    trained = {group for step in history.steps for group in step.groups}
    thrown = {group for _, group in history.discarded}
    unfinished = [n for n in range(len(history.opened)) if n not in trained and n not in thrown]
    last = min(unfinished, default=len(history.opened))
    some = [n for n in range(last) if history.opened_at[n] >= since]
    if not some:
        return 0.0, float("nan")
    all_s = np.asarray([history.opened[n] for n in some])
    kept = np.asarray([n in trained for n in some])
    if kept.all():
        return 0.0, 0.0
    if not kept.any():
        return -1.0, float("nan")
    error = np.std(all_s[kept]) / np.sqrt(kept.sum()) / all_s.mean()
    return float(all_s[kept].mean() / all_s.mean() - 1), float(error)
