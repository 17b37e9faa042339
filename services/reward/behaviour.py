"""Terms computed, one attempt at a time: what they found as it is stored, and which of them are quarantined.

Invariants
- Whatever a term does, the other terms are computed and the attempt is graded.
- A term whose answer cannot be used (it raised; its amount is no finite number; its evidence is no text) is quarantined by name,
  with the reason, and counts as not computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shared import terms
from shared.contracts.graded import Finding
from shared.contracts.trajectory import Trajectory
from shared.plugins import UnknownName
from shared.terms import Evidence, Found, Seen, Unreadable

MAX_EVIDENCE = 5
SHOWN = 300  # characters of a reason; of a piece of evidence twice as many


@dataclass(frozen=True, slots=True)
class Behaviour:
    """`findings`: of the terms that found something. `quarantined`: term -> why it has no answer. Every other one of `computed`
    found nothing."""

    findings: dict[str, Finding] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, answer: Finding | str) -> None:
        """`answer`: a text is the reason for a quarantine."""
        if isinstance(answer, str):
            self.quarantined[name] = answer
        elif answer.amount:
            self.findings[name] = answer


def observed(seen: Seen, names: Iterable[str] | None = None) -> Behaviour:
    """Compute terms in this process. `names`: None: all that are installed. They are computed whatever their weights: a term can
    get one in mid-run, and the drift watch sees those without one too."""
    found = Behaviour()
    for name in terms.names() if names is None else names:
        found.add(name, answer(name, seen))
    return found


def findings(trajectory: Trajectory, before: Mapping[str, str]) -> dict[str, Finding]:
    """Return the findings of every installed term that needs no text."""
    return observed(Seen(trajectory, before)).findings


def answer(name: str, seen: Seen) -> Finding | str:
    """Return a term's finding, or why there is none. Never raises."""
    try:
        return stored(terms.load(name)(seen))
    except UnknownName:
        return f"not installed; installed: {', '.join(terms.names())}"
    except Unreadable as error:
        return str(error)[:SHOWN]
    except Exception as error:  # whatever a term, perhaps of another package, brings about
        return f"{type(error).__name__}: {error}"[:SHOWN]


def stored(found: object) -> Finding:
    """Check a term's answer and return it as it is stored. Raises ValueError."""
    if not isinstance(found, Found):
        raise ValueError(f"answer: found {found!r:.80}; expected Found(amount, evidence)")
    amount = found.amount
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not math.isfinite(amount):
        raise ValueError(f"amount: found {amount!r:.80}; expected a finite number")
    return Finding(float(amount), [_written(piece) for piece in list(found.evidence)[:MAX_EVIDENCE]])


def _written(piece: object) -> str:
    if not isinstance(piece, Evidence) or not isinstance(piece.text, str):
        raise ValueError(f"evidence: found {piece!r:.80}; expected Evidence(text, turn)")
    if piece.place:
        return f"{piece.place}: {piece.text}"[: 2 * SHOWN]
    return (piece.text if piece.turn is None else f"turn {piece.turn}: {piece.text}")[: 2 * SHOWN]
