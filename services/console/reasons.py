"""Why a problem is held to be hard, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.standing import Reason

SAME = 1.02  # factors of the odds up to this are not worth a word


@dataclass(frozen=True, slots=True)
class Word:
    """`weight`: harder, easier, or even where it decides nothing."""

    text: str
    told: str
    weight: str


def words(reasons: Sequence[Reason]) -> list[Word]:
    """The strongest first; the run's own odds are not among them, they hold for every problem."""
    found = [(abs(_size(r.odds) - 1), _word(r)) for r in reasons if r.kind != "run" and _size(r.odds) > SAME]
    return [word for _, word in sorted(found, key=lambda pair: -pair[0])]


def _size(odds: float) -> float:
    return max(odds, 1 / odds) if odds > 0 else float("inf")


def _word(reason: Reason) -> Word:
    rests = f"odds × {reason.odds:.2f}; rests on {reason.attempts:.1f} attempts, old ones faded"
    harder = reason.odds < 1
    text = {
        "tag": reason.of,
        "relatives": "relatives fail more than promised" if harder else "relatives do better than promised",
        "effort": "relatives take more effort" if harder else "relatives take less effort",
    }.get(reason.kind, reason.kind)
    return Word(text, rests, "harder" if harder else "easier")
