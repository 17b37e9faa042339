"""Long texts for people: secrets masked, bounded, the middle folded. Pure.

A text is masked before it is cut or split into lines, so that no part of a secret is left at an edge.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.masking import masked

MAX_CHARS = 20_000  # of one text; the tokens below it on the page have the rest
MAX_PAGE_CHARS = 3_000_000  # of all texts of a page
LEAST = 400  # characters that a text has even where the page is full
FOLDED = 26  # lines, or as many long ones in characters, from which the middle is folded
_WIDE = 160  # characters of a line, where lines are long
_AROUND = 8192  # characters behind a cut: a secret may begin before it


class Masked(str):
    """A text whose secrets are masked already: no page looks for them again."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text in up to three parts. `middle`: what is folded, `folded` says how much that is; empty: nothing. `lines`: of all
    three. `left_out`: characters that are not on the page."""

    head: str
    middle: str = ""
    tail: str = ""
    folded: str = ""
    lines: int = 0
    left_out: int = 0


class Room:
    """What is left of the characters of a page. One per page: each text takes its share."""

    def __init__(self, most: int = MAX_PAGE_CHARS) -> None:
        self.left = most

    def take(self, text: str) -> str:
        return self._take(text)[0]

    def excerpt(self, text: str, head: int = 12, tail: int = 6) -> Excerpt:
        """The text with its secrets masked. `head`, `tail`: lines that are shown in any case."""
        kept, left_out = self._take(text.rstrip("\n"))
        return _folded(kept, head, tail, left_out)

    def _take(self, text: str) -> tuple[str, int]:
        most = min(MAX_CHARS, max(LEAST, self.left))
        kept = bounded(text, most)
        self.left -= len(kept)
        return kept, max(0, len(text) - most)


def bounded(text: str, most: int) -> str:
    """Return at most so many characters, with secrets masked before the cut."""
    return masked(text[: most + _AROUND])[
        :most
    ]  # a text that is cut may end within a mask's name, never within a secret


def _folded(text: str, head: int, tail: int, left_out: int) -> Excerpt:
    lines = text.split("\n")
    count = len(lines) if text else 0
    if len(lines) > FOLDED:
        pieces = lines[:head], lines[head : len(lines) - tail], lines[len(lines) - tail :]
        first, middle, last = (Masked("\n".join(piece)) for piece in pieces)
        if len(first) + len(last) <= FOLDED * _WIDE:
            return Excerpt(first, middle, last, f"{len(pieces[1]):,} more lines", count, left_out)
    if len(text) > FOLDED * _WIDE:
        size = FOLDED * _WIDE * 2 // 3
        more = f"{len(text) - size:,} more characters"
        return Excerpt(Masked(text[:size]), Masked(text[size:]), "", more, count, left_out)
    return Excerpt(Masked(text), lines=count, left_out=left_out)
