"""Which words of `runs.control` still count.

Anybody may say a word; what becomes of the run, the scheduler decides, and says in a word of its own with a number: the time in
milliseconds, or more. A scheduler that died before it noted that it had said so says it again, as does one that
stood still in the middle of it, perhaps after a run was resumed: by its number such a word is known to be old. Numbers of
the future prove nothing: no word of a stranger silences the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.contracts.messages import RunControl

AHEAD_MS = 86_400_000  # by so much two clocks may differ


class Words:
    """What one reader has heard, from the topic's beginning on."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds."""
        self._last: dict[str, int] = {}
        self._clock = clock

    def count(self, word: RunControl) -> bool:
        """Whether `word` is to be obeyed; False: the scheduler has said something later. Its last word counts every time: a
        reader that begins anew in the middle of its life hears everybody's old words again, and ends with that one."""
        last = self._last.get(word.run, 0)
        if word.number and word.number < last:
            return False
        if last < word.number < 1000 * self._clock() + AHEAD_MS:
            self._last[word.run] = word.number
        return True
