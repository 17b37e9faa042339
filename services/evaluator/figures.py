"""The figures of an evaluation, from its results. Pure and seeded: the same results give the same figures.

Attempts that infrastructure lost are in no average; their number is a figure of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import comb
from typing import Any

import msgspec
import numpy as np

from services.evaluator.plan import Result
from shared.contracts.messages import EvalRequested
from shared.statistics import bootstrap_mean

BEST_OF = 8


def rows(request: EvalRequested, results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Per problem: counts over the sampled attempts that have a verdict (`samples`, `solved`, `first_edit`, `tokens`),
    `errors`, the greedy verdict (None: there is none), and the attempts themselves."""
    by_problem: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_problem[result.problem].append(result)
    table = {}
    for problem in sorted(by_problem):
        every = sorted(by_problem[problem], key=lambda r: r.index)
        valid = [r for r in every if not r.error]
        sampled = [r for r in valid if r.index < request.samples]
        table[problem] = {
            "samples": len(sampled),
            "solved": sum(r.solved for r in sampled),
            "first_edit": sum(r.first_edit for r in sampled),
            "tokens": sum(r.tokens for r in sampled),
            "greedy": next((r.solved for r in valid if r.index == request.samples), None),
            "errors": len(every) - len(valid),
            "attempts": [_attempt(r) for r in sampled],
        }
    return table


def _attempt(result: Result) -> dict[str, Any]:
    return {
        "attempt": result.attempt,
        "solved": result.solved,
        "first_edit": result.first_edit,
        "tokens": result.tokens,
        "stop": result.stop,
        "trajectory": msgspec.to_builtins(result.trajectory),
    }


def figures(request: EvalRequested, table: dict[str, dict[str, Any]], *, seed: int = 0) -> dict[str, float]:
    """Shares are means over problems. `pass_at_1_low`, `_high`: 95 % bootstrap interval over problems; absent for one problem,
    which tells nothing of others. `best_of_k`: the
    unbiased estimate from n >= k samples that at least one of k solves the problem (`k` is 8, or the samples there are).
    `tokens_per_solved`: sampled tokens of all attempts, by those that solved; absent where nothing was solved. Without a
    single verdict only the counts are there."""
    asked = request.samples
    out: dict[str, float] = {
        "problems": float(sum(row["samples"] > 0 for row in table.values())),
        "samples": float(asked),
        "attempts": float(sum(row["samples"] for row in table.values())),
        "infrastructure_errors": float(sum(row["errors"] for row in table.values())),
    }
    sampled = [row for row in table.values() if row["samples"]]
    if sampled:
        n_P, solved_P, first_P, tokens_P = (
            np.array([row[name] for row in sampled], dtype=np.float64)
            for name in ("samples", "solved", "first_edit", "tokens")
        )
        out["pass_at_1"], low, high = bootstrap_mean(solved_P / n_P, seed=seed)
        if len(sampled) > 1:
            out["pass_at_1_low"], out["pass_at_1_high"] = low, high
        out["first_edit"] = float((first_P / n_P).mean())
        out["k"] = float(min(BEST_OF, asked))
        out["best_of_k"] = float(
            np.mean([best_of(int(n), int(s), int(out["k"])) for n, s in zip(n_P, solved_P, strict=True)])
        )
        out["mean_tokens"] = float(tokens_P.sum() / n_P.sum())
        if solved_P.sum():
            out["tokens_per_solved"] = float(tokens_P.sum() / solved_P.sum())
    greedy = [row["greedy"] for row in table.values() if row["greedy"] is not None]
    if greedy:
        out["greedy"] = float(np.mean(greedy))
    return out


def best_of(n: int, solved: int, k: int) -> float:
    """Probability that at least one of k attempts drawn without repetition from n, of which `solved` succeed, succeeds.
    With fewer than k attempts (some were lost), of those there are."""
    k = min(k, n)
    return 1.0 - comb(n - solved, k) / comb(n, k)
