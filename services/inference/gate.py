"""Whether drafts pay (`speculation`): measured while the engine decodes. Pure.

Invariants
- Without a trial nothing but steps is counted: the present way goes on at full speed.
- What is compared lies side by side in time. A machine's speed changes by half and more from one second to the next; steps
  of the other way are held only against steps of the present way right before and right after them.
- Where not even drafts that are all accepted could pay, a trial ends after seven of them.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

COLD = 12  # drafting steps that do not count: drafts are poor until the MTP layer has keys of some tokens
DRAFTED = 16  # drafting steps that count, on one side of a comparison
PLAIN = 8  # steps without drafts on one side; the first one does not count, its caches are the drafts'
HOPELESS = 0.95  # a trial of drafts ends early that could not give this share of the present way's tokens
WON, LOST = 3, 2  # comparisons that decide a trial; whichever is reached first
BADLY = 0.9  # one comparison lost by so much decides it alone
GAIN = 1.02  # by so much must the other way be faster to win a comparison
WAIT, MAX_WAIT = 256, 1 << 14  # steps between two trials; at least doubled whenever the present way wins
AGAIN = 64  # steps after which a way that has just taken over is put to the test
LOSS = 0.005  # the share of all steps that a trial which failed may have cost before the next begins


class Step(NamedTuple):
    """`tokens`: per session."""

    seconds: float
    tokens: float


@dataclass(slots=True)
class _Size:
    """Steps of batches of about one size. `sides`: of the trial that goes on: the present way, the other, the present, …; the
    last is growing."""

    drafting: bool = False
    wait: int = WAIT
    steps: int = 0  # since the last trial
    sides: list[list[Step]] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)  # of this trial: how much faster the other way was

    def wants(self) -> bool:
        return self.drafting != (len(self.sides) % 2 == 0 and len(self.sides) > 0)


class Gate:
    """Says before every step whether drafts shall be made, by how many sessions decode. Every so often the other way is tried,
    and takes over if it gives more tokens a second; the longer the present way keeps winning, and the more a trial cost, the
    later the next.

    A step counts by the median of its seconds, so that one interruption decides nothing, and the mean of its tokens. Batch sizes
    between two powers of two are one: what pays for 20 sessions pays for 24. `most`: tokens that a step can give at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: dict[int, _Size] = {}

    def wants(self, sessions: int) -> bool:
        size = self._sizes.get(sessions.bit_length())
        return size is not None and size.wants()

    def observe(self, sessions: int, drafted: bool, seconds: float, tokens: int) -> None:
        """One step that decoded `sessions` and nothing else, the same way at its beginning and its end."""
        size = self._sizes.get(sessions.bit_length())
        if size is None:
            size = self._sizes[sessions.bit_length()] = _Size()
        if not (drafted or size.drafting or size.sides):  # nearly every step of an engine that drafts do not help
            size.steps += 1
            if size.steps >= size.wait:
                size.sides.append([])
            return
        if drafted != size.wants():
            return
        if size.sides:
            self._try(size, drafted, Step(seconds, tokens / sessions))
            return
        size.steps += 1
        if size.steps >= size.wait:
            size.sides.append([])

    def _try(self, size: _Size, drafted: bool, step: Step) -> None:
        sides = size.sides
        sides[-1].append(step)
        there, other = len(sides[-1]), len(sides) % 2 == 0
        if other and drafted and there == PLAIN and self._hopeless(sides[-2], sides[-1]):
            _end(size, False)
        elif there == (COLD + DRAFTED if drafted else PLAIN):
            if len(sides) > 1 and not other:
                size.gains.append(_gain(sides[-3], sides[-2], sides[-1], drafted))
                won = sum(gain > GAIN for gain in size.gains)
                if won == WON:
                    return _end(size, True)
                if len(size.gains) - won == LOST or size.gains[-1] < BADLY:
                    return _end(size, False)
            sides.append([])
        return None

    def _hopeless(self, plain: list[Step], drafting: list[Step]) -> bool:
        return self._most / _costs(drafting[1:], plain[1:]) < HOPELESS


def _gain(before: list[Step], other: list[Step], after: list[Step], drafting: bool) -> float:
    """Tokens a second of the other way, in those of the present one. `drafting`: the present way does."""
    first, there = (COLD, 1) if drafting else (1, COLD)
    present = before[first:] + after[first:]
    return _tokens(other[there:]) / _tokens(present) / _costs(other[there:], present)


def _costs(steps: list[Step], of: list[Step]) -> float:
    return statistics.median(step.seconds for step in steps) / statistics.median(step.seconds for step in of)


def _tokens(steps: list[Step]) -> float:
    return statistics.fmean(step.tokens for step in steps)


def _end(size: _Size, takes_over: bool) -> None:
    if takes_over:
        size.drafting = not size.drafting
        size.wait = AGAIN
    else:
        size.wait = min(max(2 * size.wait, math.ceil(_lost(size.sides) / LOSS)), MAX_WAIT)
    size.sides.clear()
    size.gains.clear()
    size.steps = 0


def _lost(sides: list[list[Step]]) -> float:
    """How many steps of the present way would have given in the trial's time what the other way did not."""
    present = sides[0]
    takes, gives = statistics.median(step.seconds for step in present), _tokens(present)
    return sum(
        len(side) * statistics.median(step.seconds for step in side) / takes - sum(step.tokens for step in side) / gives
        for side in sides[1::2]
    )
