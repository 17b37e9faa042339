"""Whether the estimates of hardness come true: what was predicted of each group before it was heard of, against what became of it.
Pure.

The prediction is made from all groups that the ledger had before, so no group helps to predict itself. The expected calibration
error is that of Guo et al. 2017 (arXiv 1706.04599), over attempts: sum over bins of the predicted chance of
share of the bin × |mean predicted - mean solved|.

A group teaches nothing when all of its attempts end alike. How often that is to be expected follows from the chance of the
problem and from how much problems of one chance differ: `spread`, the correlation of two attempts of one group, estimated from the
variance of what groups solved beyond that of independent attempts. The attempts of a group are then beta-binomial.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp, lgamma

BINS = 10  # of the predicted chance, of equal width
KEPT = 2000  # groups that count: the newest
# The spread of problems of one chance before any group is known, and how many groups that is worth.
PRIOR_SPREAD, PRIOR_GROUPS = 0.2, 10.0
LEAST_SPREAD, MOST_SPREAD = 0.01, 0.95


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one group. `silent`: the chance that its attempts end alike, all solved or none."""

    chance: float
    silent: float
    attempts: int
    solved: int


@dataclass(frozen=True, slots=True)
class Bin:
    """`predicted`, `solved`: means over the attempts of the groups of the bin."""

    groups: int
    attempts: int
    predicted: float
    solved: float


@dataclass(frozen=True, slots=True)
class Report:
    """`error`: the expected calibration error, 0 to 1. `brier`: mean squared error of the predicted chance per attempt.
    `silent_predicted`, `silent`: shares of groups whose attempts end alike. `bins`: those that are not empty, by chance."""

    groups: int
    attempts: int
    error: float
    brier: float
    silent_predicted: float
    silent: float
    bins: tuple[Bin, ...]


def silent(chance: float, spread: float, attempts: int) -> float:
    """Return the chance that all of the attempts are solved or none is, of a beta-binomial with this mean and correlation."""
    strength = 1 / spread - 1
    a, b = chance * strength, (1 - chance) * strength

    def log_beta(x: float, y: float) -> float:
        return lgamma(x) + lgamma(y) - lgamma(x + y)

    return exp(log_beta(a + attempts, b) - log_beta(a, b)) + exp(log_beta(a, b + attempts) - log_beta(a, b))


def report(predictions: Iterable[Prediction]) -> Report:
    """Compare predictions with what came. Nothing was predicted: zeros, no bins."""
    found = list(predictions)
    attempts = sum(p.attempts for p in found)
    if not attempts:
        return Report(0, 0, 0.0, 0.0, 0.0, 0.0, ())
    of: dict[int, list[Prediction]] = {}
    for p in found:
        of.setdefault(min(BINS - 1, int(p.chance * BINS)), []).append(p)
    bins = []
    for _, some in sorted(of.items()):
        n = sum(p.attempts for p in some)
        predicted = sum(p.attempts * p.chance for p in some) / n
        bins.append(Bin(len(some), n, predicted, sum(p.solved for p in some) / n))
    squares = sum(p.solved * (1 - p.chance) ** 2 + (p.attempts - p.solved) * p.chance**2 for p in found)
    return Report(
        groups=len(found),
        attempts=attempts,
        error=sum(b.attempts * abs(b.predicted - b.solved) for b in bins) / attempts,
        brier=squares / attempts,
        silent_predicted=sum(p.silent for p in found) / len(found),
        silent=sum(p.solved in (0, p.attempts) for p in found) / len(found),
        bins=tuple(bins),
    )


@dataclass(slots=True)
class Calibration:
    """The newest predictions of a run, in the ledger's order."""

    newest: deque[Prediction] = field(default_factory=lambda: deque(maxlen=KEPT))
    _excess: float = 0.0  # variance of what groups solved, beyond that of independent attempts
    _most: float = 0.0  # the same if all attempts of a group ended alike
    changed: int = 0  # groups so far

    @property
    def spread(self) -> float:
        """How much problems of one predicted chance differ: the correlation of two attempts of one group."""
        found = (PRIOR_SPREAD * PRIOR_GROUPS * 0.25 + self._excess) / (PRIOR_GROUPS * 0.25 + self._most)
        return min(MOST_SPREAD, max(LEAST_SPREAD, found))

    def add(self, chance: float, attempts: int, solved: int) -> None:
        """A group is complete of which this chance had been predicted."""
        self.newest.append(Prediction(chance, silent(chance, self.spread, attempts), attempts, solved))
        alone = chance * (1 - chance)
        self._excess += (solved / attempts - chance) ** 2 - alone / attempts
        self._most += alone * (1 - 1 / attempts)
        self.changed += 1
