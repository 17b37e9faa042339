"""Up to when everything that was said on some topics has been handled. Pure.

Partitions are read at different speeds. So a time counts as read only once every partition has been handled up to where it
ended at that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.bus import Standing

Partition = tuple[str, int]  # topic name, partition


@dataclass(slots=True)
class Watermark:
    """`upto`: the answer, in seconds; minus infinity: not known yet."""

    upto: float = float("-inf")
    _at: float | None = None  # when the ends below were seen; None: none were
    _ends: dict[Partition, int] = field(default_factory=dict)

    def advance(self, now: float, standing: Mapping[Partition, Standing]) -> float:
        """`standing`: where the readers stand, asked for at `now` or later. Return `upto`."""
        if self._at is not None:
            if any(at.acknowledged < self._ends.get(partition, 0) for partition, at in standing.items()):
                return self.upto
            self.upto = self._at
        self._at, self._ends = now, {partition: at.end for partition, at in standing.items()}
        return self.upto
