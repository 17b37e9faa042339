"""Compares solve rates before and after practice by kind of problem. So a kind that practice unlearned is seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table

from shared.contracts.run import Ref
from shared.objects import Objects
from shared.problems.pack import Lines
from shared.problems.schema import Problem
from shared.statistics import paired_difference

FEWEST = 10  # problems of a kind; kinds with fewer are told together
OTHERS = "others"


def kinds_of(objects: Objects, pack: Ref) -> dict[str, str]:
    """Return problem id -> kind, the last part of its category. `debugging/return` is of the kind `return`. `pack`: the public
    part."""
    return {problem.id: problem.category.rpartition("/")[2] for problem in Lines(objects.get(pack), Problem)}


def by_kind(
    before: Mapping[str, float], after: Mapping[str, float], kinds: Mapping[str, str], *, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return for each kind the mean solve rates over the problems measured twice, and their paired difference with its 95 %
    bootstrap interval over problems, most problems first. `before`, `after`: problem id -> solve rate."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(before.keys() & after.keys()):
        groups[kinds.get(name) or OTHERS].append(name)
    for kind in [kind for kind, names in groups.items() if len(names) < FEWEST and kind != OTHERS]:
        groups[OTHERS] += groups.pop(kind)
    order = sorted(groups, key=lambda kind: (kind == OTHERS, -len(groups[kind]), kind))
    return {kind: _gain(before, after, groups[kind], seed) for kind in order if groups[kind]}


def _gain(before: Mapping[str, float], after: Mapping[str, float], names: list[str], seed: int) -> dict[str, Any]:
    a, b = np.array([before[name] for name in names]), np.array([after[name] for name in names])
    mean, low, high = paired_difference(a, b, seed=seed)
    return {
        "problems": len(names),
        "before": float(a.mean()),
        "after": float(b.mean()),
        "gain": mean,
        "ci95": [low, high] if len(names) > 1 else None,
    }


def table(kinds: Mapping[str, Mapping[str, Any]]) -> Table:
    result = Table(title="by kind of problem, pass@1", title_justify="left")
    for column in ("", "problems", "before", "after", "gain, points"):
        result.add_column(column, justify="right" if column else "left")
    for kind, found in kinds.items():
        sure = " [{:+.1f}, {:+.1f}]".format(*(100 * end for end in found["ci95"])) if found["ci95"] else ""
        cells = (f"{found['before']:.1%}", f"{found['after']:.1%}", f"{100 * found['gain']:+.1f}{sure}")
        result.add_row(kind, str(found["problems"]), *cells)
    return result
