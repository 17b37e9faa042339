"""Verdict, effort and behaviour to one number, term by term."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

import msgspec

from services.reward import penalty
from shared.contracts.graded import Finding, Graded
from shared.contracts.messages import Effort, Verdict
from shared.contracts.run import NO_TERM, RewardConfig
from shared.length import length_penalty
from shared.terms import names

JUDGE = "judge"  # the term that graders ask a model for


def score(
    config: RewardConfig,
    verdict: Verdict,
    effort: Effort,
    findings: Mapping[str, Finding],
    without: Container[str] = (),
) -> tuple[float, dict[str, float]]:
    """Return (reward, terms). Every term is signed and weighted; `sum(terms.values())` is the reward, exactly. `without`: terms
    that could not be computed for this attempt; they add nothing, and are not among the terms."""
    share = float(verdict.solved) if isinstance(verdict.steps, msgspec.UnsetType) else sum(verdict.steps)
    terms = {"solved": config.solved * share if share else 0.0}
    if config.length is not None and (verdict.solved or config.length.apply == "all"):
        terms["length"] = 0.0 - length_penalty(effort, config.length)
    if verdict.solved or config.behaviour_apply == "all":
        for name, weight in config.behaviour.items():
            if name in without:
                continue
            terms[name] = weight * findings.get(name, Finding()).amount + 0.0  # + 0.0: never minus zero
    return sum(terms.values()), terms


def missing(config: RewardConfig, graded: Graded) -> dict[str, str]:
    """Return the terms with a weight that the grader could not compute for an attempt, each with the reason. A grader of before,
    which does not say what it has, had all terms of its time."""
    wanted = [name for name, weight in config.behaviour.items() if weight]
    lacking = [] if graded.terms is None else [name for name in wanted if name not in graded.terms]
    return {
        **{
            name: f"grader {graded.grader} does not have it: "
            + ("set ETUDE_JUDGE_URL there" if name == JUDGE else "install there the package that brings it")
            for name in lacking
        },
        **{name: reason for name, reason in graded.quarantined.items() if name in wanted},
    }


def check(config: RewardConfig) -> None:
    """Raises ValueError naming the field, what was found and what is allowed."""
    if not math.isfinite(config.solved):
        raise ValueError(f"reward.solved: found {config.solved}, expected a finite number")
    if config.length is not None:
        penalty.check(config.length)
    for name, weight in config.behaviour.items():
        if name not in names():
            raise ValueError(f"reward.behaviour: found {name!r}; allowed: {', '.join(names())}; {NO_TERM}")
        if not math.isfinite(weight):
            raise ValueError(f"reward.behaviour.{name}: found {weight}, expected a finite number")
