"""Calls that only read, made one turn after another although they could have been made together.

A reading call waited for nothing when every argument of it was known a turn earlier: each word of it stands in the task, in what
the agent said, or in an answer before the last one. Each such turn costs a generation, and a whole prefill on the way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.terms import Evidence, Found, Made, Seen, Turn

_WORD = re.compile(r"[\w/][\w./-]+\w")
MAX_TEXT = 1 << 16  # characters of one answer that are looked through


def find(seen: Seen) -> Found:
    """Count the turns that only read, and could have been part of the turn before them, which only read too; and calls that repeat
    a read although nothing was changed or run since."""
    if sum(seen.effect(span.tool) == "reads" for _, span in seen.calls()) < 2:
        return Found()
    known = [seen.task[:MAX_TEXT]]  # what the turn before could know
    evidence: list[Evidence] = []
    asked: set[str] = set()
    before: Turn | None = None
    for turn in seen.turns:
        said = f"{turn.text} {turn.thinking}"
        if not _only_reads(turn):
            asked.clear()
        elif (
            before is not None
            and _only_reads(before)
            and all(_waited_for_nothing(m, before, known) for m in turn.calls)
        ):
            evidence.append(_said(turn, "read after the turn before it, and waited for nothing that it said"))
        for made in turn.calls if _only_reads(turn) else ():
            name = f"{made.tool} {sorted(made.arguments.items(), key=repr)}"
            if name in asked and not (evidence and evidence[-1].turn == turn.number):
                evidence.append(_said(turn, f"{made.tool} again, and nothing was changed since"))
            asked.add(name)
        # This turn knows the answer that came before it; the turn before did not.
        known += [
            before.output[:MAX_TEXT] if before else "",
            said,
            " ".join(sorted(set().union(*map(_words, turn.calls)))),
        ]
        before = turn
    return Found(float(len(evidence)), evidence)


def _only_reads(turn: Turn) -> bool:
    return bool(turn.calls) and all(made.effect == "reads" and made.ok for made in turn.calls)


def _waited_for_nothing(made: Made, before: Turn, known: Sequence[str]) -> bool:
    """Whether a call could have been made with `before`. To go on in the same file, one has to know how it began."""
    words = _words(made)
    if any(words & _words(earlier) for earlier in before.calls):
        return False
    return all(any(word in text for text in known) for word in words)


def _words(made: Made) -> set[str]:
    return {word for value in made.arguments.values() if isinstance(value, str) for word in _WORD.findall(value)}


def _said(turn: Turn, text: str) -> Evidence:
    return Evidence(text, turn.number, turn.calls[0].place)
