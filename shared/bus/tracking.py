"""Which offset a consumer may commit when deliveries are acknowledged in any order. Pure; used by every adapter."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import OrderedDict
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

    __slots__ = ("_before", "_done", "_last", "_open", "_passed", "position")

    def __init__(self, position: int, before: Iterable[int] = ()) -> None:
        """`before`: offsets beyond `position` that an earlier consumer finished."""
        self.position = position  # the next offset to read after a restart; this is what gets committed
        self._last = position - 1  # given
        self._open: OrderedDict[int, None] = (
            OrderedDict()
        )  # rising; who stands first is asked with every acknowledgement
        # Ranges, since one open offset can hold the position for a day, with a million done behind it.
        self._done = Ranges()  # beyond `position`
        self._before = Ranges(runs(sorted(offset for offset in before if offset >= position)))
        self._passed = 0  # so many of its ranges end at `_last` or before: counted in `_done`, or gone from the log

    def give(self, offset: int) -> bool:
        """`offset` goes out to the consumer, unless an earlier one finished it: then it is True, and the offset counts and is
        given to nobody. Raises ValueError unless it is beyond all given before."""
        if offset <= self._last:
            raise ValueError(f"offset {offset} given out of order: expected at least {self._last + 1}")
        finished = self.was_finished(offset)
        self._last = offset
        while self._passed < len(self._before.lasts) and self._before.lasts[self._passed] <= offset:
            self._passed += 1
        if finished:
            self._finish(offset)
        else:
            self._open[offset] = None
        return finished

    def done(self, offset: int) -> None:
        """`offset` is acknowledged. Repeating it, or naming one that was never given, changes nothing."""
        if offset in self._open:
            del self._open[offset]
            self._finish(offset)

    def was_finished(self, offset: int) -> bool:
        """Whether an earlier consumer finished it: to be given, for the count's sake, but not to anybody."""
        if self._passed == len(self._before.lasts):  # as nearly always
            return False
        at = bisect_left(self._before.lasts, offset, self._passed)
        return at < len(self._before.lasts) and max(self._before.firsts[at], self._last + 1) <= offset

    def finished(self) -> Iterator[tuple[int, int]]:
        """What is done beyond `position`: (first, last), rising. Costs what is taken of it."""
        yield from self._done
        for at in range(self._passed, len(self._before.lasts)):
            yield max(self._before.firsts[at], self._last + 1), self._before.lasts[at]

    @property
    def open(self) -> int:
        """How many were given and are not done."""
        return len(self._open)

    def _finish(self, offset: int) -> None:
        first = next(iter(self._open), None)
        if first is not None and first < offset:
            self._done.add(offset)
        elif not self._done.firsts:  # it held the position, and nothing behind it is finished: as nearly always
            self.position = offset + 1
        else:
            end = self._done.drop_below(self._last + 1 if first is None else first)
            self.position = max(offset, end) + 1


class Ranges:
    """Numbers, as ranges that neither touch nor overlap, rising. To add one costs little near the end."""

    __slots__ = ("firsts", "lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        pairs = list(ranges)
        self.firsts = [first for first, _ in pairs]
        self.lasts = [last for _, last in pairs]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.firsts, self.lasts, strict=True)

    def add(self, number: int) -> None:
        """`number` must not be in it."""
        at = bisect_left(self.firsts, number)
        after = at > 0 and self.lasts[at - 1] == number - 1
        before = at < len(self.firsts) and self.firsts[at] == number + 1
        if after and before:
            self.lasts[at - 1] = self.lasts.pop(at)
            del self.firsts[at]
        elif after:
            self.lasts[at - 1] = number
        elif before:
            self.firsts[at] = number
        else:
            self.firsts.insert(at, number)
            self.lasts.insert(at, number)

    def drop_below(self, number: int) -> int:
        """Forgets the ranges that begin below `number`; returns the last number of them, -1 for none."""
        count = bisect_left(self.firsts, number)
        last = self.lasts[count - 1] if count else -1
        del self.firsts[:count], self.lasts[:count]
        return last


def write_ranges(position: int, ranges: Iterable[tuple[int, int]], room: int) -> str:
    """Rising ranges, relative to `position`: "etude:3-7,9"; "" for none. What does not fit into `room` characters is left
    out: it comes again."""
    text = ""
    room -= len(TAG)
    left = MOST
    for first, last in _joined(ranges):
        last = min(last, first + left - 1)
        part = f"{first - position}" if first == last else f"{first - position}-{last - position}"
        longer = f"{text},{part}" if text else part
        if len(longer) > room or left == 0:
            break
        text = longer
        left -= last - first + 1
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


def runs(offsets: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Rising offsets as ranges."""
    return _joined((offset, offset) for offset in offsets)


def _joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same without those that touch."""
    held: tuple[int, int] | None = None
    for first, last in ranges:
        if held is not None and first == held[1] + 1:
            held = held[0], last
        else:
            if held is not None:
                yield held
            held = first, last
    if held is not None:
        yield held
