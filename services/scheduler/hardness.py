"""How hard problems are, from what became of earlier attempts at their relatives, and which to practise next. Pure.

Every problem is used once, so what is known of it comes from its category and its relatives (`cell`: problems of one
origin, of any category). A category is made of tags, as "debugging/comparison/surprise-05", or of a repository problem
"bugfix/boundary/language-python/size-09". Each of them shifts the odds of the run's pass rate, by how its problems did against
what their other tags had promised. So does a cell, against what all tags had promised: easy problems of a function say little of
its hard ones. Old results fade, because the policy that produced them is gone. Turns and thinking tokens above the run's mean
count as hardness beyond the pass rate.

A group teaches when its attempts differ. The expected variance of one attempt, E[p (1 - p)] over the posterior, says how
much that is: nothing where all fail and nothing where all succeed. An exploration bonus (the posterior's standard
deviation) probes relatives that nobody has tried.

The schedule has stages. A run begins with uniform draws: nothing is known of the policy yet, and what is drawn then teaches the
estimate about all kinds of problems. Over UNIFORM_STEPS the power of the weights grows from 0 to SHARPNESS. A run sees
a small part of its problems, so that power makes it the part that teaches most: where a pool is mostly out of
reach, drawing in plain proportion spends most attempts on groups that fail as a whole. Over TILT_STEPS a tilt towards hard
problems grows. At every stage each top category (the first tag) is drawn at least CATEGORY_FLOOR / (1 + CATEGORY_FLOOR) as often
as uniform draws would (`catalogue`).

The estimate of the run's first groups is kept (`chance_at_first`). Harder problems are drawn as the policy gets better, so the
share that is solved stays level. What is solved beyond that first estimate shows the gain.

A probe (`etude tasks probe`) tries some problems before the run. Its results are evidence like those of groups, of less weight.
The run begins so much further on: evidence as heavy as that of its first groups takes the place of the first stage.

Predictions are kept beside what came (`calibration`). They are of the solve rate alone: effort says which of two problems with
equal solve rates is harder, and moves weights only.

The evidence of at most MAX_CELLS cells is kept. One cell more, and the half with the least faded evidence is forgotten: these
cells are estimated by their category again, as before anybody tried them. A cell that rested on e attempts moves by no more
than e / (e + CELL_STRENGTH) of the way to its category. With 16 groups a step and a cell of its own for each, that is below
1 % for all that is forgotten.
"""

from __future__ import annotations

import copy
import math
from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from services.scheduler.calibration import Calibration

HALF_LIFE_STEPS = 40.0  # after so many steps a result counts half
ATTEMPT_WEIGHT = 0.5  # attempts of one group are alike: eight of them say less than eight of eight problems
# What an attempt of a probe counts; less than one of the run, for its checkpoint and its limits may be others.
PROBE_WEIGHT = 0.25
RUN_STRENGTH = 4.0  # prior of the run's mean, in attempts, around PRIOR_MEAN
TAG_STRENGTH = 8.0  # likewise of a tag, in attempts as its other tags promised
CELL_STRENGTH = 3.0  # likewise of a cell, in attempts as its tags promised
PRIOR_MEAN = 0.3  # chance of success before anybody has tried anything
LEAST = 1e-4  # chance; keeps odds finite
EXPLORATION = 0.25  # × the posterior's standard deviation
UNIFORM_STEPS = 10.0  # after so many steps the weights have their full power; before, draws are nearer to uniform
# × its share of problems: a category's least share of the weights, before these are made to add up.
CATEGORY_FLOOR = 0.2
TILT_STEPS = 50.0  # after so many steps the tilt towards hard problems is full
TILT = 0.5  # × the expected chance of failure: so much more weight, in the end
SHARPNESS = 3.0  # power of the weights: above 1, what teaches most is drawn more than in proportion
TURNS_EXPONENT, THINKING_EXPONENT = 0.5, 0.25  # of the ratio to the run's mean, in the odds of failing
FIRST_GROUPS = 160  # whose estimate is kept: ten steps of 16 groups
FIRST_ATTEMPTS = 8 * FIRST_GROUPS  # of them, as groups usually are
FLOOR = 1e-3  # × the largest weight: nothing is impossible
COLUMNS = 6  # of the sums
MAX_CELLS = 10_000  # with evidence; the weights of all of them are computed whenever a result has come


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
class Probed:
    """What a probe found out of one problem before the run: attempts, one or more, and how many of them were solved."""

    category: str
    cell: str
    attempts: int
    solved: int


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of the odds that an attempt succeeds. `kind`, `of`: see `shared.contracts.standing.Reason`. `attempts`:
    what it rests on, faded and weighted."""

    kind: str
    of: str
    odds: float
    attempts: float


class _Tally:
    """Faded sums per key: attempts, solved, turns, thinking tokens, what was promised to be solved without the key, and the
    attempts of which turns and thinking are known."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}
        self.sums = np.zeros((16, COLUMNS))

    def row(self, key: str) -> int:
        row = self.index.setdefault(key, len(self.index))
        if row >= len(self.sums):
            self.sums = np.concatenate([self.sums, np.zeros_like(self.sums)])
        return row

    def forget_half(self) -> None:
        """Keep the keys with the most attempts; of equal ones the last by name."""
        kept = sorted(self.index, key=lambda key: (self.sums[self.index[key], 0], key))[len(self.index) // 2 :]
        rows = [self.index[key] for key in kept]
        self.sums = np.concatenate([self.sums[rows], np.zeros((max(16, len(kept)), COLUMNS))])
        self.index = {key: row for row, key in enumerate(kept)}


class Hardness:
    """Estimates per (category, cell). `observe` and `probe` in the ledger's order; the same order gives the same estimates."""

    def __init__(self) -> None:
        self._tags, self._cells, self._run = _Tally(), _Tally(), _Tally()
        self._run.row("")
        self._step = 0
        self.observed = 0  # outcomes so far
        self.probed = 0  # attempts of a probe so far
        self.forgettings = 0  # times that cells were forgotten
        self.calibration = Calibration()
        self._first: Hardness | None = None  # as it was after FIRST_GROUPS

    @property
    def tried(self) -> KeysView[str]:
        """Cells with evidence of their own, in the order in which they were tried, until some are forgotten."""
        return self._cells.index.keys()

    def observe(self, outcome: Outcome) -> None:
        if outcome.step > self._step:
            for tally in (self._run, self._tags, self._cells):
                tally.sums *= 0.5 ** ((outcome.step - self._step) / HALF_LIFE_STEPS)
            self._step = outcome.step
        effort = (outcome.turns, outcome.thinking_tokens)
        weight = outcome.attempts * ATTEMPT_WEIGHT
        chance = self._add(outcome.category, outcome.cell, outcome.solved / outcome.attempts, weight, effort)
        self.calibration.add(chance, outcome.attempts, outcome.solved)
        self.observed += 1
        if self.observed == FIRST_GROUPS:
            self._first = copy.deepcopy(self)

    def probe(self, found: Probed) -> None:
        """Take over what a probe found out, as in `observe`, with a weight of its own. It dates from step 0 and fades like an
        outcome. It is no group of the run, so predictions are not held against it, and it says nothing of effort."""
        weight = found.attempts * PROBE_WEIGHT * 0.5 ** (self._step / HALF_LIFE_STEPS)
        self._add(found.category, found.cell, found.solved / found.attempts, weight, None)
        self.probed += found.attempts

    def _add(self, category: str, cell: str, solved: float, weight: float, effort: tuple[float, float] | None) -> float:
        """Add evidence of this `weight` in attempts, of which the share `solved` was, and return the chance that was predicted.
        `effort`: turns and thinking tokens of an attempt; None: not known."""
        tags = _tags_of(category)
        shifts = self._shifts(tags)
        odds = _odds(self._run_mean()) * shifts.prod()
        (chance,) = self._chance(odds[None], self.rows([cell])).tolist()
        promised = [(self._run, "", 0.0), (self._cells, cell, _from_odds(odds))]
        promised += [(self._tags, tag, _from_odds(odds / shift)) for tag, shift in zip(tags, shifts, strict=True)]
        turns, thinking, known = (0.0, 0.0, 0.0) if effort is None else (*effort, 1.0)
        for tally, key, share in promised:
            at = tally.row(key)  # first: it may move the table
            tally.sums[at] += weight * np.array([1.0, solved, turns, thinking, share, known])
        if len(self._cells.index) > MAX_CELLS:
            self._cells.forget_half()
            self.forgettings += 1
        return float(chance)

    def posterior(self, categories: Sequence[str], cells: Sequence[str | None]) -> tuple[np.ndarray, np.ndarray]:
        """Beta parameters (a, b) of the chance that one attempt succeeds, for pairs of category and cell. None: any cell
        without evidence. The chance is held between LEAST and 1 - LEAST."""
        return self._posterior(self.odds(categories), self.rows(cells))

    def _posterior(self, category_odds: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        strength, did, promised, effort = self._of_cells(rows, _from_odds(category_odds))
        mean = np.clip(_from_odds(category_odds * did / promised / effort), LEAST, 1 - LEAST)
        return mean * strength, (1 - mean) * strength

    def chance(self, categories: Sequence[str], cells: Sequence[str | None]) -> np.ndarray:
        """The chance that one attempt succeeds, by solve rates alone. Pairs as in `posterior`."""
        return self._chance(self.odds(categories), self.rows(cells))

    def chance_at_first(self, category: str, cell: str) -> float | None:
        """Return the chance that the policy of the run's first groups solves one attempt. None: there were fewer than
        FIRST_GROUPS groups."""
        return None if self._first is None else float(self._first.chance([category], [cell])[0])

    def _chance(self, category_odds: np.ndarray, rows: np.ndarray) -> np.ndarray:
        _, did, promised, _ = self._of_cells(rows, _from_odds(category_odds))
        return np.clip(_from_odds(category_odds * did / promised), LEAST, 1 - LEAST)

    def rows(self, cells: Sequence[str | None]) -> np.ndarray:
        """Where the evidence of each cell is, until cells are forgotten; -1: it has none."""
        index: Mapping[str | None, int] = self._cells.index  # type: ignore[assignment]
        return np.fromiter((index.get(cell, -1) for cell in cells), dtype=np.int64, count=len(cells))

    def _of_cells(self, rows: np.ndarray, category_mean: np.ndarray) -> tuple[np.ndarray, ...]:
        """What each rests on (attempts), the odds of what it did and of what was promised, and by how much effort divides."""
        run, cell = self._run.sums[0], _sums(self._cells, rows)
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
        strength, did, promised, effort = (x[0] for x in self._of_cells(self.rows([cell]), self.expected([category])))
        factors.append(Factor("relatives", cell, float(did / promised), float(strength - CELL_STRENGTH)))
        factors.append(Factor("effort", cell, float(1 / effort), float(strength - CELL_STRENGTH)))
        return factors

    def power(self, step: int) -> float:
        """Return the share of their full power that weights have at a step of the run; 0: draws are uniform."""
        known = self.probed * PROBE_WEIGHT / (FIRST_ATTEMPTS * ATTEMPT_WEIGHT)
        return min(1.0, step / UNIFORM_STEPS + known)

    @property
    def mean(self) -> float:
        """The chance of success over the run's late attempts."""
        return float(self._run_mean())

    def cells(self, cells: Sequence[str]) -> np.ndarray:
        """[cells, 3]: attempts, of them solved, and how many their tags had promised; faded and weighted."""
        return _sums(self._cells, self.rows(cells))[:, [0, 1, 4]]

    def expected(self, categories: Sequence[str]) -> np.ndarray:
        """The chance of success by category alone."""
        return _from_odds(self.odds(categories))

    def odds(self, categories: Sequence[str]) -> np.ndarray:
        """The odds of success by category alone."""
        distinct: dict[str, int] = {}  # there are few, of many kinds of problems; to sort them all would take longer
        which = np.fromiter(
            (distinct.setdefault(category, len(distinct)) for category in categories), np.int64, len(categories)
        )
        tags = [_tags_of(category) for category in distinct]
        known = list(dict.fromkeys(tag for some in tags for tag in some))
        shifts = dict(zip(known, self._shifts(known).tolist(), strict=True))
        shift = np.array([math.prod(shifts[tag] for tag in some) for some in tags])
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

    def weights(self, categories: Sequence[str], cells: Sequence[str | None], *, step: int) -> np.ndarray:
        """Sampling weights (positive, not normalised) at `step` of the run. Cells: as in `posterior`."""
        return self.weights_of(self.odds(categories), self.rows(cells), step=step)

    def weights_of(self, odds: np.ndarray, rows: np.ndarray, *, step: int) -> np.ndarray:
        """As `weights`, of categories with these `odds`, and cells whose evidence is in these `rows`."""
        if not len(rows):
            return np.zeros(0)
        a, b = self._posterior(odds, rows)
        n = a + b
        signal = a * b / (n * (n + 1))
        deviation = np.sqrt(a * b / (n * n * (n + 1)))
        tilt = 1 + TILT * min(1.0, step / TILT_STEPS) * b / n
        weights = (signal + EXPLORATION * deviation) ** (SHARPNESS * self.power(step)) * tilt
        return np.maximum(weights, FLOOR * weights.max())


def _tags_of(category: str) -> list[str]:
    return category.split("/")


def _odds(successes: np.ndarray, attempts: np.ndarray | float = 1.0) -> np.ndarray:
    mean = np.clip(successes / attempts, LEAST, 1 - LEAST)
    return mean / (1 - mean)


def _from_odds(odds: np.ndarray) -> np.ndarray:
    return odds / (1 + odds)


def _rows(tally: _Tally, keys: Sequence[str]) -> np.ndarray:
    """Their sums [len(keys), COLUMNS]; zeros where a key has none. Looking up makes no entries."""
    return _sums(tally, np.fromiter((tally.index.get(key, -1) for key in keys), dtype=np.int64, count=len(keys)))


def _sums(tally: _Tally, rows: np.ndarray) -> np.ndarray:
    """[len(rows), COLUMNS]; zeros for the row -1."""
    return np.where(rows[:, None] >= 0, tally.sums[rows], 0.0)


def _ratio(cell: np.ndarray, run: np.ndarray, column: int) -> np.ndarray:
    """Mean of a column per attempt relative to the run's, over attempts of which it is known; shrunk towards 1 where that is
    little."""
    known = COLUMNS - 1
    if run[known] <= 0 or run[column] <= 0:
        return np.ones(len(cell))
    usual = run[column] / run[known]
    return (cell[:, column] + CELL_STRENGTH * usual) / ((cell[:, known] + CELL_STRENGTH) * usual)
