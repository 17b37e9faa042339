"""How long attempts last: recorded, or drawn from a heavy-tailed distribution. Seconds. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHORTEST_S, LONGEST_S = 10.0, 7200.0
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeavyTailed:
    """A log-normal distribution, cut off at both ends: most attempts are short, a few last a hundred times as long.

    `median_s`: half of the attempts are shorter. `spread`: the standard deviation of the logarithm; 0: all are equal. `alike`: the
    share of the variance that the problem decides; the attempts of one group share it.
    """

    median_s: float = 120.0
    spread: float = 1.0
    alike: float = 0.5
    shortest_s: float = SHORTEST_S
    longest_s: float = LONGEST_S

    def __post_init__(self) -> None:
        """Raises ValueError that names the field."""
        if not 0 < self.shortest_s <= self.median_s <= self.longest_s < math.inf:
            raise ValueError(
                f"durations: found shortest {self.shortest_s:g} s, median {self.median_s:g} s, longest {self.longest_s:g} s; "
                "allowed: above 0 and in this order"
            )
        if not 0 <= self.spread < math.inf:
            raise ValueError(f"spread: found {self.spread:g}; allowed: at least 0")
        if not 0 <= self.alike <= 1:
            raise ValueError(f"alike: found {self.alike:g}; allowed: 0 to 1")

    def groups(self, count: int, size: int, random: np.random.Generator) -> Seconds:
        """Draw the seconds of every attempt: `[count, size]`."""
        problem = random.standard_normal((count, 1)) * math.sqrt(self.alike)
        attempt = random.standard_normal((count, size)) * math.sqrt(1 - self.alike)
        drawn = self.median_s * np.exp(self.spread * (problem + attempt))
        return np.clip(drawn, self.shortest_s, self.longest_s)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Attempts of a real run, group by group; groups are drawn with replacement."""

    recorded: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        """Raises ValueError when nothing was recorded, or a time that is none."""
        if not any(self.recorded):
            raise ValueError("durations: found no finished attempt; allowed: at least one")
        for group in self.recorded:
            for seconds in group:
                if not 0 < seconds < math.inf:
                    raise ValueError(f"durations: found {seconds:g} s; allowed: above 0 and finite")

    def groups(self, count: int, size: int, random: np.random.Generator) -> Seconds:
        """Draw the seconds of every attempt: `[count, size]`. A group of fewer attempts lends some of its own again."""
        some = [np.asarray(group, dtype=np.float64) for group in self.recorded if len(group)]
        drawn = np.empty((count, size))
        for row in range(count):
            group = some[random.integers(len(some))]
            drawn[row] = random.choice(group, size, replace=len(group) < size)
        return drawn


Durations = HeavyTailed | Recorded
