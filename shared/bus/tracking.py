"""Which offset a consumer may commit when deliveries are acknowledged in any order. Pure; used by every adapter."""

from __future__ import annotations

from collections import deque


class OffsetTracker:
    """Offsets of one partition: given out in rising order (gaps allowed), acknowledged in any order.

    Invariants: `position` never passes an offset that was given and is not done, and never falls. Everything below
    `position` that was given is done. A consumer that starts again at `position` misses nothing.
    """

    __slots__ = ("_given", "_open", "position")

    def __init__(self, position: int) -> None:
        self.position = position  # the next offset to read after a restart; this is what gets committed
        self._given: deque[int] = deque()  # rising; the first one is always open
        self._open: set[int] = set()

    def give(self, offset: int) -> None:
        """`offset` goes out to the consumer. Raises ValueError unless it is beyond all given before."""
        floor = self._given[-1] + 1 if self._given else self.position
        if offset < floor:
            raise ValueError(f"offset {offset} given out of order: expected at least {floor}")
        self._given.append(offset)
        self._open.add(offset)

    def done(self, offset: int) -> None:
        """`offset` is acknowledged. Repeating it, or naming one that was never given, changes nothing."""
        if offset not in self._open:
            return
        self._open.remove(offset)
        while self._given and self._given[0] not in self._open:
            self.position = self._given.popleft() + 1

    @property
    def open(self) -> int:
        """How many were given and are not done."""
        return len(self._open)
