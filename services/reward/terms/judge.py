"""The score of the rubric judge (`services.reward.judge`). Graders ask it themselves, for many attempts at once."""

from __future__ import annotations

from shared.terms import Found, Seen, Unreadable


def find(seen: Seen) -> Found:
    """Raise Unreadable: a term is no place to wait for a model."""
    raise Unreadable("no judge is asked here; graders ask the one that ETUDE_JUDGE_URL names")
