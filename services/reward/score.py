"""Verdict, effort and behaviour to one number, term by term."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.reward import penalty
from services.reward.behaviour import TERMS
from shared.contracts.graded import Finding
from shared.contracts.messages import Effort, Verdict
from shared.contracts.run import RewardConfig


def score(
    config: RewardConfig, verdict: Verdict, effort: Effort, findings: Mapping[str, Finding]
) -> tuple[float, dict[str, float]]:
    """(reward, terms). Every term is signed and weighted; `sum(terms.values())` is the reward, exactly."""
    terms = {"solved": config.solved if verdict.solved else 0.0}
    if config.length is not None and (verdict.solved or config.length.apply == "all"):
        terms["length"] = 0.0 - penalty.length_penalty(effort, config.length)
    if verdict.solved or config.behaviour_apply == "all":
        for name, weight in config.behaviour.items():
            terms[name] = weight * findings.get(name, Finding()).amount + 0.0  # + 0.0: never minus zero
    return sum(terms.values()), terms


def check(config: RewardConfig) -> None:
    """Raises ValueError naming the field, what was found and what is allowed."""
    if not math.isfinite(config.solved):
        raise ValueError(f"reward.solved: found {config.solved}, expected a finite number")
    if config.length is not None:
        penalty.check(config.length)
    for name, weight in config.behaviour.items():
        if name not in TERMS:
            raise ValueError(f"reward.behaviour: found {name!r}; allowed: {', '.join(sorted(TERMS))}")
        if not math.isfinite(weight):
            raise ValueError(f"reward.behaviour.{name}: found {weight}, expected a finite number")
