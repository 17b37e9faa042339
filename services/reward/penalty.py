"""The length penalty as a configuration has it: its ranges. The formula is in shared.length, for the trainer charges by it too."""

from __future__ import annotations

import math

from shared.contracts.run import ROLES, LengthPenalty


def check(penalty: LengthPenalty) -> None:
    """Raise ValueError naming the field: outside of these ranges C is not increasing and concave."""
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
