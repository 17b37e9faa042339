"""What a grader leaves of an attempt, `verdict.json` in the folder of its epoch: the reward is computed from it,
and the console shows it.

It names no case and holds no value of one: findings are made of what the agent did and of the files as it was given them, and
an error is the name of an exception that was known before the agent wrote anything (`services.reward.grading`).
"""

from __future__ import annotations

import msgspec

from shared.contracts.ids import attempt_prefix
from shared.contracts.messages import AttemptKey, Verdict


class Finding(msgspec.Struct, frozen=True):
    """`amount`: what the term's weight is multiplied with. `evidence`: in words; one with a place in the trajectory begins with
    `place`."""

    amount: float = 0.0
    evidence: list[str] = []


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """`findings`: behaviour terms that found something, with or without a weight."""

    verdict: Verdict
    findings: dict[str, Finding] = {}
    grader: str = ""


def verdict_key(run: str, key: AttemptKey) -> str:
    return f"{attempt_prefix(run, key.attempt, key.epoch)}/verdict.json"


def place(segment: int, start: int, end: int) -> str:
    """Tokens [start, end) of a segment, in words."""
    return f"segment {segment}, tokens {start}-{end}"
