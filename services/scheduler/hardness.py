"""How hard problems are, from what became of earlier attempts at their relatives, and which to practise next. Pure.

Every problem is used once, so what is known of it comes from its category and its relatives (`cell`: problems of one
origin, of any category). A category is made of tags, "debugging/comparison/surprise-05"; each of them shifts the odds of the
run's pass rate, by how its problems did against what their other tags had promised. So does a cell, against what all tags
had promised: easy problems of a function say little of its hard ones. Old results fade, because the policy that produced them
is gone. Turns and thinking tokens above the run's mean count as hardness beyond the pass rate.

A group teaches when its attempts differ. The expected variance of one attempt, E[p (1 - p)] over the posterior, says how
much that is: nothing where all fail and nothing where all succeed. An exploration bonus (the posterior's standard
deviation) probes relatives that nobody has tried, and a tilt towards hardness grows with the stage of the run. A run sees
a small part of its problems, so the power SHARPNESS makes it the part that teaches most: where a pool is mostly out of
reach, drawing in plain proportion spends most attempts on groups that fail as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

HALF_LIFE_STEPS = 40.0  # after so many steps a result counts half
ATTEMPT_WEIGHT = 0.5  # attempts of one group are alike: eight of them say less than eight of eight problems
RUN_STRENGTH = 4.0  # prior of the run's mean, in attempts, around PRIOR_MEAN
TAG_STRENGTH = 8.0  # likewise of a tag, in attempts as its other tags promised
CELL_STRENGTH = 3.0  # likewise of a cell, in attempts as its tags promised
PRIOR_MEAN = 0.3  # chance of success before anybody has tried anything
LEAST = 1e-4  # chance; keeps odds finite
EXPLORATION = 0.25  # × the posterior's standard deviation
TILT_STEPS = 50.0  # after so many steps the tilt towards hard problems is full
TILT = 0.5  # × the expected chance of failure: so much more weight, in the end
SHARPNESS = 3.0  # power of the weights: above 1, what teaches most is drawn more than in proportion
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


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of the odds that an attempt succeeds. `kind`, `of`: see `shared.contracts.standing.Reason`. `attempts`:
    what it rests on, faded and weighted."""

    kind: str
    of: str
    odds: float
    attempts: float


class _Tally:
    """Faded sums per key: attempts, solved, turns, thinking tokens, and what was promised to be solved without the key."""

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
        self._tags, self._cells, self._run = _Tally(), _Tally(), _Tally()
        self._run.row("")
        self._step = 0

    def observe(self, outcome: Outcome) -> None:
        if outcome.step > self._step:
            for tally in (self._run, self._tags, self._cells):
                tally.sums *= 0.5 ** ((outcome.step - self._step) / HALF_LIFE_STEPS)
            self._step = outcome.step
        tags = _tags_of(outcome.category)
        shifts = self._shifts(tags)
        odds = _odds(self._run_mean()) * shifts.prod()
        promised = [(self._run, "", 0.0), (self._cells, outcome.cell, _from_odds(odds))]
        promised += [(self._tags, tag, _from_odds(odds / shift)) for tag, shift in zip(tags, shifts, strict=True)]
        weight = outcome.attempts * ATTEMPT_WEIGHT
        for tally, key, share in promised:
            at = tally.row(key)  # first: it may move the table
            tally.sums[at] += weight * np.array(
                [1.0, outcome.solved / outcome.attempts, outcome.turns, outcome.thinking_tokens, share]
            )

    def posterior(self, categories: Sequence[str], cells: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Beta parameters (a, b) of the chance that one attempt succeeds, for pairs of category and cell. The chance is held
        between LEAST and 1 - LEAST."""
        category_odds = self._expected_odds(categories)
        strength, did, promised, effort = self._of_cells(cells, _from_odds(category_odds))
        mean = np.clip(_from_odds(category_odds * did / promised / effort), LEAST, 1 - LEAST)
        return mean * strength, (1 - mean) * strength

    def _of_cells(self, cells: Sequence[str], category_mean: np.ndarray) -> tuple[np.ndarray, ...]:
        """What each rests on (attempts), the odds of what it did and of what was promised, and by how much effort divides."""
        run, cell = self._run.sums[0], _rows(self._cells, cells)
        strength = cell[:, 0] + CELL_STRENGTH
        did = (cell[:, 1] + CELL_STRENGTH * category_mean) / strength
        promised = (cell[:, 4] + CELL_STRENGTH * category_mean) / strength
        effort = _ratio(cell, run, 2) ** TURNS_EXPONENT * _ratio(cell, run, 3) ** THINKING_EXPONENT
        return strength, _odds(did), _odds(promised), effort

    def explain(self, category: str, cell: str) -> list[Factor]:
        """The factors whose product is the odds of `posterior`'s mean, before that is held in its bounds; the run's own odds
        first."""
        tags, run = _tags_of(category), self._run.sums[0]
        factors = [Factor("run", "", float(_odds(self._run_mean())), float(run[0]))]
        tried = _rows(self._tags, tags)[:, 0]
        for tag, shift, attempts in zip(tags, self._shifts(tags), tried, strict=True):
            factors.append(Factor("tag", tag, float(shift), float(attempts)))
        strength, did, promised, effort = (x[0] for x in self._of_cells([cell], self.expected([category])))
        factors.append(Factor("relatives", cell, float(did / promised), float(strength - CELL_STRENGTH)))
        factors.append(Factor("effort", cell, float(1 / effort), float(strength - CELL_STRENGTH)))
        return factors

    @property
    def mean(self) -> float:
        """The chance of success over the run's late attempts."""
        return float(self._run_mean())

    def cells(self, cells: Sequence[str]) -> np.ndarray:
        """[cells, 3]: attempts, of them solved, and how many their tags had promised; faded and weighted."""
        return _rows(self._cells, cells)[:, [0, 1, 4]]

    def expected(self, categories: Sequence[str]) -> np.ndarray:
        """The chance of success by category alone."""
        return _from_odds(self._expected_odds(categories))

    def _expected_odds(self, categories: Sequence[str]) -> np.ndarray:
        distinct: dict[str, int] = {}  # there are few, of many kinds of problems; to sort them all would take longer
        which = np.fromiter(
            (distinct.setdefault(category, len(distinct)) for category in categories), np.int64, len(categories)
        )
        shift = np.array([self._shifts(_tags_of(category)).prod() for category in distinct])
        return (_odds(self._run_mean()) * shift)[which]

    def _run_mean(self) -> np.ndarray:
        run = self._run.sums[0]
        return (run[1] + RUN_STRENGTH * PRIOR_MEAN) / (run[0] + RUN_STRENGTH)

    def _shifts(self, tags: Sequence[str]) -> np.ndarray:
        """By how much each tag multiplies the odds."""
        rows, mean = _rows(self._tags, tags), self._run_mean()
        return _odds(rows[:, 1] + TAG_STRENGTH * mean, rows[:, 0] + TAG_STRENGTH) / _odds(
            rows[:, 4] + TAG_STRENGTH * mean, rows[:, 0] + TAG_STRENGTH
        )

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


def _tags_of(category: str) -> list[str]:
    return category.split("/")


def _odds(successes: np.ndarray, attempts: np.ndarray | float = 1.0) -> np.ndarray:
    mean = np.clip(successes / attempts, LEAST, 1 - LEAST)
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
