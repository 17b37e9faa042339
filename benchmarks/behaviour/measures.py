"""Computes the figures of the experiments from rows of attempts. Pure: the same rows give the same figures.

Groups are what varies independently: the attempts of one group are at one problem. So intervals (95 %) are bootstraps over groups.

Windows. A run's groups are told apart by when they were asked for: before the change and after it. Only the last half of each
part counts, because the policy needs time to react. A policy also changes without the term: control runs, over the same seconds
since their first request, measure that. The term's effect is the change minus theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.behaviour.table import Row, groups
from shared.statistics import bootstrap_mean, contrast, of_means

Measure = Callable[[Row], float]
MEASURES: dict[str, Measure] = {
    "found": lambda row: row.found,
    "solved": lambda row: float(row.solved),
    "tokens": lambda row: float(row.tokens),
    "turns": lambda row: float(row.turns),
}


@dataclass(frozen=True, slots=True)
class Windows:
    """In seconds since a run's first request: groups asked for in [begin, end) count."""

    before: tuple[float, float]
    after: tuple[float, float]

    @classmethod
    def around(cls, change: float, end: float) -> Windows:
        return cls((change / 2, change), ((change + end) / 2, end))


def changed_at(rows: Iterable[Row]) -> float | None:
    """Return the time of the first request under the later configuration, in seconds. Return None if there is none."""
    return min((row.seconds for row in rows if row.later), default=None)


def by_run(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the rows by (arm, seed)."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.arm, row.seed), []).append(row)
    return dict(sorted(found.items()))


def group_means(rows: Iterable[Row], window: tuple[float, float], measure: Measure) -> np.ndarray:
    """Return the mean of a measure for each group of the window, float64 [groups]. Attempts without an answer (-1) are left out."""
    kept = [row for row in rows if window[0] <= row.seconds < window[1]]
    means = ([measure(row) for row in group if measure(row) >= 0] for group in groups(kept).values())
    return np.array([float(np.mean(values)) for values in means if values])


def curve(rows: Iterable[Row], measure: Measure, every: int) -> list[tuple[float, float, float, float, int]]:
    """Return (version, mean, low, high, groups) for each `every` versions, over groups by the newest version that sampled them."""
    buckets: dict[int, list[float]] = {}
    for group in groups(list(rows)).values():
        values = [measure(row) for row in group if measure(row) >= 0]
        if values:
            buckets.setdefault(max(row.version for row in group) // every, []).append(float(np.mean(values)))
    return [
        (bucket * every + (every - 1) / 2, *bootstrap_mean(np.array(values)), len(values))
        for bucket, values in sorted(buckets.items())
    ]


def term_effect(treated: Sequence[Row], controls: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """Return, for each measure, what changed in one run with the term, in the control runs at the same time, and the difference of
    the two. `controls`: empty: nothing is known of the drift, and the term's effect is None. Raises ValueError where the change
    or a window holds no group."""
    change = changed_at(treated)
    if change is None:
        raise ValueError("no group was scored by the later configuration")
    end = max(row.seconds for row in treated) + 1e-6
    windows = Windows.around(change, end)
    found: dict[str, Any] = {"change_s": change, "end_s": end, "groups": {}}
    for name, measure in MEASURES.items():
        before, after = (group_means(treated, window, measure) for window in (windows.before, windows.after))
        drift = [
            np.concatenate([group_means(rows, window, measure) for rows in controls] or [np.array([])])
            for window in (windows.before, windows.after)
        ]
        known = all(part.size for part in drift)
        found[name] = {
            "before": bootstrap_mean(before),
            "after": bootstrap_mean(after),
            "change": contrast([before, after], [-1, 1]),
            "control_before": bootstrap_mean(drift[0]) if known else None,
            "control_after": bootstrap_mean(drift[1]) if known else None,
            "control_change": contrast(drift, [-1, 1]) if known else None,
            "effect": contrast([before, after, *drift], [-1, 1, 1, -1]) if known else None,
        }
        found["groups"] = {"before": len(before), "after": len(after), "control": [len(part) for part in drift]}
    return found


def length_effect(pairs: Sequence[tuple[Sequence[Row], Sequence[Row]]], share: float = 0.5) -> dict[str, Any]:
    """Return what the length penalty did. `pairs`: for each seed the attempts of a run with the penalty and of one without.

    The two runs of a seed see the same problems in the same order; compared are those that both have among the last `share` of
    the shorter run's draws. `tokens_per_solved` and `tokens` are relative differences (-0.2: a fifth less with the penalty),
    `solved` a difference. Raises ValueError where there is no problem to compare."""
    table = np.concatenate([_paired(*pair, share) for pair in pairs] or [np.empty((0, 4))])
    if not len(table):
        raise ValueError("the runs with and without the penalty share no problem")
    return {
        "problems": len(table),
        "with": _side(table[:, :2]),
        "without": _side(table[:, 2:]),
        "tokens_per_solved": of_means(table, lambda m: m[:, 0] / m[:, 1] / (m[:, 2] / m[:, 3]) - 1),
        "tokens": of_means(table, lambda m: m[:, 0] / m[:, 2] - 1),
        "solved": of_means(table, lambda m: m[:, 1] - m[:, 3]),
    }


def _paired(charged: Sequence[Row], free: Sequence[Row], share: float) -> np.ndarray:
    """Return one row for each problem that both have: tokens and solved share with the penalty, tokens and solved share without;
    float64 [problems, 4]."""
    last = min(max((row.draw for row in rows), default=0) for rows in (charged, free))
    first = (1 - share) * last
    one, other = (_by_problem(row for row in rows if first <= row.draw <= last) for rows in (charged, free))
    common = sorted(one.keys() & other.keys())
    return np.array([[*one[problem], *other[problem]] for problem in common]).reshape(-1, 4)


def _side(table_PC: np.ndarray) -> dict[str, Any]:
    return {
        "tokens": bootstrap_mean(table_PC[:, 0]),
        "solved": bootstrap_mean(table_PC[:, 1]),
        "tokens_per_solved": of_means(table_PC, lambda m: m[:, 0] / m[:, 1]),
    }


def _by_problem(rows: Iterable[Row]) -> Mapping[str, tuple[float, float]]:
    """Return the mean sampled tokens and the share of solved attempts for each problem."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.problem, []).append(row)
    return {
        problem: (float(np.mean([row.tokens for row in own])), float(np.mean([row.solved for row in own])))
        for problem, own in found.items()
    }


def across(effects: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Return the mean of the seeds' effects, and of how many the interval leaves out 0."""
    return {
        "mean": float(np.mean([value for value, _, _ in effects])),
        "beyond": sum(low > 0 or high < 0 for _, low, high in effects),
        "seeds": len(effects),
    }
