"""Which offset a consumer may commit when deliveries are acknowledged in any order. Pure; used by every adapter."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator

TAG = "etude:"
MOST = 100_000  # offsets in one text: more than are ever in hand, and no bomb for who reads it
_RANGE = re.compile(r"([0-9]{1,12})(?:-([0-9]{1,12}))?")


class OffsetTracker:
    """Offsets of one partition: given out in rising order (gaps allowed), acknowledged in any order.

    Invariants: `position` never passes an offset that was given and is not done, and never falls. Everything below
    `position` that was given is done. A consumer that starts again at `position` misses nothing; if it is told what was
    `finished` beyond, it gets that not again either.
    """

    __slots__ = ("_before", "_given", "_open", "_passed", "position")

    def __init__(self, position: int, before: Iterable[int] = ()) -> None:
        """`before`: offsets beyond `position` that an earlier consumer finished."""
        self.position = position  # the next offset to read after a restart; this is what gets committed
        self._given: deque[int] = deque()  # rising; the first one is always open
        self._open: set[int] = set()
        self._before = sorted(offset for offset in before if offset >= position)
        self._passed = 0  # so many of them lie before the last offset given: counted there, or gone from the log

    def give(self, offset: int) -> bool:
        """`offset` goes out to the consumer, unless an earlier one finished it: then it is True, and the offset counts and is
        given to nobody. Raises ValueError unless it is beyond all given before."""
        floor = self._given[-1] + 1 if self._given else self.position
        if offset < floor:
            raise ValueError(f"offset {offset} given out of order: expected at least {floor}")
        finished = self.was_finished(offset)
        self._passed = bisect_right(self._before, offset, self._passed)
        self._given.append(offset)
        if finished:
            self._advance()
        else:
            self._open.add(offset)
        return finished

    def done(self, offset: int) -> None:
        """`offset` is acknowledged. Repeating it, or naming one that was never given, changes nothing."""
        if offset not in self._open:
            return
        self._open.remove(offset)
        self._advance()

    def was_finished(self, offset: int) -> bool:
        """Whether an earlier consumer finished it: to be given, for the count's sake, but not to anybody."""
        if self._passed == len(self._before):  # as nearly always
            return False
        at = bisect_left(self._before, offset, self._passed)
        return at < len(self._before) and self._before[at] == offset

    def finished(self) -> Iterator[int]:
        """What is done beyond `position`, rising."""
        given = [offset for offset in self._given if offset not in self._open]
        return itertools.chain(given, itertools.islice(self._before, self._passed, None))

    @property
    def open(self) -> int:
        """How many were given and are not done."""
        return len(self._open)

    def _advance(self) -> None:
        while self._given and self._given[0] not in self._open:
            self.position = self._given.popleft() + 1


def write_ranges(position: int, offsets: Iterable[int], room: int) -> str:
    """Rising offsets, relative to `position`: "etude:3-7,9"; "" for none. What does not fit into `room` characters is left
    out: it comes again."""
    text = ""
    room -= len(TAG)
    for first, last in _runs(itertools.islice(offsets, MOST)):
        part = f"{first - position}" if first == last else f"{first - position}-{last - position}"
        longer = f"{text},{part}" if text else part
        if len(longer) > room:
            break
        text = longer
    return TAG + text if text else ""


def read_ranges(position: int, text: str) -> list[int]:
    """What `write_ranges` wrote; [] for any other text: somebody else's metadata says nothing."""
    if not text.startswith(TAG):
        return []
    found: list[int] = []
    for part in text.removeprefix(TAG).split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        rising = not found or position + first > found[-1]
        if not rising or not 0 <= last - first < MOST - len(found):
            return []
        found += range(position + first, position + last + 1)
    return found


def _runs(offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for offset in offsets:
        if first is None or last is None:
            first = last = offset
        elif offset == last + 1:
            last = offset
        else:
            yield first, last
            first = last = offset
    if first is not None and last is not None:
        yield first, last
