"""Which words of `runs.control` still count. Pure.

Anybody may say a word; what becomes of the run, the scheduler decides, and says in a word of its own with a number that grows
with every message of the run. A scheduler that died before it noted that it had said so says it again, as does one that
stood still in the middle of it, perhaps after a run was resumed: by its number such a word is known to be old.
"""

from __future__ import annotations

from shared.contracts.messages import RunControl


class Words:
    """What one reader has heard, from the topic's beginning on."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def count(self, word: RunControl) -> bool:
        """Whether `word` is to be obeyed; False: the scheduler has said something later. Its last word counts every time: a
        reader that begins anew in the middle of its life hears everybody's old words again, and ends with that one."""
        if word.number and word.number < self._last.get(word.run, 0):
            return False
        self._last[word.run] = max(word.number, self._last.get(word.run, 0))
        return True
