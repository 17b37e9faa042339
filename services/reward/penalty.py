"""The length penalty: what an attempt spent, and the concave price of it (docs/recipe.md, "Reward")."""

from __future__ import annotations

import math

from shared.contracts.messages import Effort
from shared.contracts.run import LengthPenalty

ROLES = ("thinking", "tool_call", "tool_output", "final")


def cost(x: float, k: float, q: float) -> float:
    """C_{k,q}(x) = ((1 + k x)^(1-q) - 1) / (k (1-q)): increasing, concave, C(0) = 0, C'(0) = 1.

    q = 0: x. q = 1: ln(1 + k x) / k. q > 1: saturates at 1 / (k (q - 1)). k = 0: x.
    Written as u/k * expm1(z)/z with u = ln(1 + k x), z = (1 - q) u: no branch loses digits near q = 1.
    """
    if k == 0.0:
        return x
    u = math.log1p(k * x)
    z = (1.0 - q) * u
    return u / k * (math.expm1(z) / z if z else 1.0)


def effort_units(effort: Effort, penalty: LengthPenalty) -> float:
    """x: weighted tokens in units of `unit_tokens`, plus weighted calls and turns."""
    tokens = {
        "thinking": effort.thinking_tokens,
        "tool_call": effort.tool_call_tokens,
        "tool_output": effort.tool_output_tokens,
        "final": effort.final_tokens,
    }
    weighted = sum(weight * tokens[role] for role, weight in penalty.token_weights.items())
    return weighted / penalty.unit_tokens + penalty.per_tool_call * effort.tool_calls + penalty.per_turn * effort.turns


def length_penalty(effort: Effort, penalty: LengthPenalty) -> float:
    """What is subtracted from the reward."""
    return penalty.weight * cost(effort_units(effort, penalty), penalty.k, penalty.q)


def check(penalty: LengthPenalty) -> None:
    """Raises ValueError naming the field: outside these ranges C is not increasing and concave."""
    for name, least in (("weight", 0.0), ("k", 0.0), ("q", 0.0), ("per_tool_call", 0.0), ("per_turn", 0.0)):
        value = getattr(penalty, name)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"reward.length.{name}: found {value}, expected a finite number of at least {least:g}")
    if not (math.isfinite(penalty.unit_tokens) and penalty.unit_tokens > 0):
        raise ValueError(f"reward.length.unit_tokens: found {penalty.unit_tokens}, expected a number above 0")
    for role, weight in penalty.token_weights.items():
        if role not in ROLES or not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"reward.length.token_weights: found {role!r} = {weight}; allowed: weights of at least 0 for "
                f"{', '.join(ROLES)}"
            )
