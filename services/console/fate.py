"""What became of an attempt's tokens: at which step they were trained, and how far trainer and sampler were apart there. Pure.

Neither is kept of a single token. A step names the groups that it trained, and the trainer measures the mismatch over all
tokens that one version sampled of a step's batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.console.board import RunBoard, Step
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Purpose


@dataclass(frozen=True, slots=True)
class Fate:
    """Of the tokens that an attempt sampled. `step`: that trained its group; None: none has so far. `told`: in a word, `why`: in
    a sentence."""

    step: int | None
    told: str
    why: str


def fate(run: RunBoard, key: AttemptKey) -> Fate:
    if key.purpose is Purpose.evaluate:
        return Fate(None, "no: evaluation", "An evaluation's attempt: nothing of it is ever trained.")
    step = run.trained(key.group)
    if step is None:
        why = "No step that this console has heard of has trained its group: it is not complete yet, waits, or was given up."
        return Fate(None, "not so far", why)
    return Fate(step, f"at step {step}", f"Its group was trained at step {step}.")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Trainer against sampler, over all tokens that `version` sampled of the batch of `step`. `p99`: of |log ratio|."""

    version: int
    step: int
    k3: float
    p99: float | None


def mismatches(steps: Mapping[int, Step], versions: Sequence[int], trained: int | None) -> list[Mismatch]:
    """At the step that trained the attempt; where none is known to, at every step that trained tokens of these versions."""
    found = []
    for version in versions:
        for number in sorted(steps) if trained is None else [trained]:
            metrics = steps[number].metrics if number in steps else {}
            k3 = metrics.get(f"mismatch_k3_version_{version}")
            if k3 is not None:
                found.append(Mismatch(version, number, k3, metrics.get(f"mismatch_p99_version_{version}")))
    return found
