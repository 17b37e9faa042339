"""Sampled ids to text, as they come. Pure.

Invariants: the text depends on the ids alone, not on the portions they came in; it grows and is never taken back; it holds
no half character before `close`, and nothing from the first stop sequence on.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what half a character reads as
PATIENCE = 8  # tokens: a character has four bytes at most; what is no text by then never becomes any


class Reader:
    """`text`: so far. `tokens`: how many ids it took. `stopped`: a stop sequence was found; further ids change nothing."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._hidden, self._stops = tokenizer, hidden, stops
        self._overlap = max(map(len, stops), default=0)
        self._ids: list[int] = []  # the end of what was read: some tokens of context, then those that are no text yet
        self._context = 0
        self.text, self.tokens, self.stopped = "", 0, False

    def feed(self, ids: Sequence[int]) -> None:
        for id in ids:
            if self.stopped:
                return
            self.tokens += 1
            if id not in self._hidden:
                self._ids.append(id)
                self._read(patient=True)

    def close(self) -> None:
        """No further ids come."""
        if not self.stopped:
            self._read(patient=False)

    @property
    def settled(self) -> int:
        """Characters of the text that no stop sequence can cut off any more."""
        return len(self.text) if self.stopped else len(self.text) - begun(self.text, self._stops)

    def _read(self, *, patient: bool) -> None:
        # Some tokenizers write a token otherwise where nothing stands before it: it is read behind the ones before.
        before = self._tokenizer.decode(self._ids[: self._context], skip_special_tokens=False)
        now = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        waiting = len(self._ids) - self._context
        half = now.endswith(REPLACEMENT)
        if half and patient and waiting < PATIENCE:
            return
        self._ids = [] if half else self._ids[self._context :]  # what comes behind half a character is no part of it
        self._context = len(self._ids)
        self._add(now[len(before) :])

    def _add(self, new: str) -> None:
        start = max(0, len(self.text) - self._overlap)
        self.text += new
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True


def begun(text: str, wanted: Sequence[str]) -> int:
    """Characters at the end of the text that one of `wanted` may begin with."""
    for n in range(min(len(text), max(map(len, wanted), default=0)), 0, -1):
        if any(len(w) > n and text.endswith(w[:n]) for w in wanted):
            return n
    return 0
