"""How hard problems are, from what became of earlier attempts at their relatives, and which to practise next. Pure.

Every problem is used once, so what is known of it comes from its category and its relatives (`cell`: problems of one
origin, of any category). The category's pass rate is shrunk towards the run's. A cell shifts its odds: by how its problems
did against what their categories had promised, so that easy problems of a function say little of its hard ones. Old results
fade, because the policy that produced them is gone. Turns and thinking tokens above the run's mean count as hardness
beyond the pass rate.

A group teaches when its attempts differ. The expected variance of one attempt, E[p (1 - p)] over the posterior, says how
much that is: nothing where all fail and nothing where all succeed. An exploration bonus (the posterior's standard
deviation) probes relatives that nobody has tried, and a tilt towards hardness grows with the stage of the run. A run sees
a small part of its problems, so the power SHARPNESS makes it the part that teaches most: where a pool is mostly out of
reach, drawing in plain proportion spends most attempts on groups that fail as a whole.

Mined pools hold many problems of the kinds that are easily made: in ours a quarter are wrong variables, which a small
policy hardly ever finds. `balanced` therefore makes a category's chance independent of how many problems it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

HALF_LIFE_STEPS = 40.0  # after so many steps a result counts half
ATTEMPT_WEIGHT = 0.5  # attempts of one group are alike: eight of them say less than eight of eight problems
RUN_STRENGTH = 4.0  # prior of the run's mean, in attempts, around PRIOR_MEAN
CATEGORY_STRENGTH = 8.0
CELL_STRENGTH = 3.0
PRIOR_MEAN = 0.3
LEAST = 1e-4  # chance; keeps odds finite
EXPLORATION = 0.25  # × the posterior's standard deviation
TILT_STEPS = 50.0  # after so many steps the tilt towards hard problems is full
TILT = 0.5
SHARPNESS = 3.0
TURNS_EXPONENT, THINKING_EXPONENT = 0.5, 0.25  # of the ratio to the run's mean, in the odds of failing
FLOOR = 1e-3  # × the largest weight: nothing is impossible


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one complete group. `turns` and `thinking_tokens` are means per attempt; `step` dates it."""

    category: str
    cell: str
    attempts: int
    solved: int
    turns: float
    thinking_tokens: float
    step: int


class _Tally:
    """Faded sums per key: attempts, solved, turns, thinking tokens, and what the categories had promised to be solved."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.sums = np.zeros((16, 5))

    def row(self, key: str) -> int:
        row = self.index.setdefault(key, len(self.index))
        if row >= len(self.sums):
            self.sums = np.concatenate([self.sums, np.zeros_like(self.sums)])
        return row


class Hardness:
    """Estimates per (category, cell). `observe` in the ledger's order; the same order gives the same estimates."""

    def __init__(self) -> None:
        self._categories, self._cells, self._run = _Tally(), _Tally(), _Tally()
        self._run.row("")
        self._step = 0

    def observe(self, outcome: Outcome) -> None:
        tallies = (self._run, self._categories, self._cells)
        if outcome.step > self._step:
            for tally in tallies:
                tally.sums *= 0.5 ** ((outcome.step - self._step) / HALF_LIFE_STEPS)
            self._step = outcome.step
        weight = outcome.attempts * ATTEMPT_WEIGHT
        solved = outcome.solved / outcome.attempts
        promised = self._category_means([outcome.category])[0]
        row = weight * np.array([1.0, solved, outcome.turns, outcome.thinking_tokens, promised])
        for tally, key in zip(tallies, ("", outcome.category, outcome.cell), strict=True):
            at = tally.row(key)  # first: it may move the table
            tally.sums[at] += row

    def posterior(self, categories: Sequence[str], cells: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Beta parameters (a, b) of the chance that one attempt succeeds, for pairs of category and cell."""
        run, category_mean = self._run.sums[0], self._category_means(categories)
        cell = _rows(self._cells, cells)
        strength = cell[:, 0] + CELL_STRENGTH
        did = (cell[:, 1] + CELL_STRENGTH * category_mean) / strength
        promised = (cell[:, 4] + CELL_STRENGTH * category_mean) / strength
        mean = _from_odds(_odds(category_mean) * _odds(did) / _odds(promised))
        effort = _ratio(cell, run, 2) ** TURNS_EXPONENT * _ratio(cell, run, 3) ** THINKING_EXPONENT
        mean = _from_odds(_odds(mean) / effort)
        return mean * strength, (1 - mean) * strength

    def _category_means(self, categories: Sequence[str]) -> np.ndarray:
        run = self._run.sums[0]
        run_mean = (run[1] + RUN_STRENGTH * PRIOR_MEAN) / (run[0] + RUN_STRENGTH)
        category = _rows(self._categories, categories)
        return (category[:, 1] + CATEGORY_STRENGTH * run_mean) / (category[:, 0] + CATEGORY_STRENGTH)

    def weights(self, categories: Sequence[str], cells: Sequence[str], *, step: int) -> np.ndarray:
        """Sampling weights (positive, not normalised) at `step` of the run."""
        if not len(cells):
            return np.zeros(0)
        a, b = self.posterior(categories, cells)
        n = a + b
        signal = a * b / (n * (n + 1))
        deviation = np.sqrt(a * b / (n * n * (n + 1)))
        tilt = 1 + TILT * min(1.0, step / TILT_STEPS) * b / n
        weights = (signal + EXPLORATION * deviation) ** SHARPNESS * tilt
        return np.maximum(weights, FLOOR * weights.max())


def balanced(weights: np.ndarray, categories: np.ndarray) -> np.ndarray:
    """Weights divided by the number of problems of the same category. `categories`: int64, one per weight."""
    return weights / np.bincount(categories)[categories]


def _odds(mean: np.ndarray) -> np.ndarray:
    mean = np.clip(mean, LEAST, 1 - LEAST)
    return mean / (1 - mean)


def _from_odds(odds: np.ndarray) -> np.ndarray:
    return odds / (1 + odds)


def _rows(tally: _Tally, keys: Sequence[str]) -> np.ndarray:
    """Their sums [len(keys), 5]; zeros where a key has none. Looking up makes no entries."""
    at = np.fromiter((tally.index.get(key, -1) for key in keys), dtype=np.int64, count=len(keys))
    return np.where(at[:, None] >= 0, tally.sums[at], 0.0)


def _ratio(cell: np.ndarray, run: np.ndarray, column: int) -> np.ndarray:
    """Mean of a column per attempt relative to the run's, shrunk towards 1 where little is known."""
    if run[0] <= 0 or run[column] <= 0:
        return np.ones(len(cell))
    usual = run[column] / run[0]
    return (cell[:, column] + CELL_STRENGTH * usual) / ((cell[:, 0] + CELL_STRENGTH) * usual)


def fingerprints(problems: Sequence[str]) -> np.ndarray:
    """uint64 per problem id: makes a draw independent of the order in which problems were admitted."""
    return np.fromiter((xxhash.xxh3_64_intdigest(p.encode()) for p in problems), dtype=np.uint64, count=len(problems))


def draw(weights: np.ndarray, fingerprint: np.ndarray, count: int, *, seed: int, number: int) -> np.ndarray:
    """Indices of `count` problems, without repetition, in proportion to their weights (an exponential race).

    Deterministic: `seed` of the run and `number` of the draw fix the luck of every problem, whatever order they stand in.
    """
    salt = np.uint64(xxhash.xxh3_64_intdigest(f"{seed}|{number}".encode()))
    mixed = fingerprint ^ salt
    with np.errstate(over="ignore"):  # splitmix64; it wraps on purpose
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    luck = (mixed >> np.uint64(11)).astype(np.float64) / 2.0**53
    arrival = -np.log1p(-luck) / weights
    count = min(count, len(arrival))
    first = np.argpartition(arrival, count - 1)[:count] if count else np.zeros(0, dtype=np.int64)
    return first[np.lexsort((fingerprint[first], arrival[first]))]
