"""A grader's verdict on one trajectory, an object in the folder of the attempt's epoch: the reward is computed from it,
and the console shows it.

Two workers may finish the same epoch, so the object's name carries the trajectory's checksum: every trajectory has a verdict
of its own.

It names no case and holds no value of one: findings are made of what the agent did and of the files as it was given them, and
an error is the name of an exception that was known before the agent wrote anything (`shared.environments.function.grading`).
"""

from __future__ import annotations

import msgspec
import xxhash

from shared.contracts.ids import attempt_prefix
from shared.contracts.messages import AttemptKey, Verdict
from shared.contracts.run import Ref


class Finding(msgspec.Struct, frozen=True):
    """`amount`: what the term's weight is multiplied with. `evidence`: in words; one with a place in the trajectory begins with
    `place`."""

    amount: float = 0.0
    evidence: list[str] = []


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """`findings`: behaviour terms that found something, with or without a weight. `quarantined`: terms that have no answer for this
    attempt, with the reason. `terms`: those that the grader has; None: a grader of before, which did not say."""

    verdict: Verdict
    findings: dict[str, Finding] = {}
    grader: str = ""
    quarantined: dict[str, str] = {}
    terms: list[str] | None = None


def verdict_key(run: str, key: AttemptKey, trajectory: Ref | None) -> str:
    """Return the name of the verdict on this trajectory. None: the name that graders of earlier releases used for the epoch."""
    prefix = attempt_prefix(run, key.attempt, key.epoch)
    if trajectory is None:
        return f"{prefix}/verdict.json"
    # Hashed again: a message may carry any text as a checksum, a path too.
    return f"{prefix}/verdict-{xxhash.xxh3_64_hexdigest(trajectory.checksum.encode())}.json"


def place(segment: int, start: int, end: int) -> str:
    """Tokens [start, end) of a segment, in words."""
    return f"segment {segment}, tokens {start}-{end}"
