"""The length penalty: effort in units, its concave price, and the share of the price that each turn of an attempt owes.

The reward service subtracts the price of a whole attempt. With credit by turn the trainer charges each turn what its own
effort added, C(x after) - C(x before). Both compute it here, from the same recorded effort.

Invariant: the charges of an attempt's turns are never negative, and they sum to its penalty exactly, in any order.
Formula: docs/recipe.md, "Reward". Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shared.contracts.messages import Effort
from shared.contracts.run import LengthPenalty
from shared.contracts.trajectory import Segment, Trajectory

UNTOLD = -1  # the turn of sampled tokens that no span covers
SAMPLED = frozenset({"thinking", "tool_call", "final", "summary"})
_FIELDS = {"tool_call": "tool_call_tokens", "final": "final_tokens", "tool_output": "tool_output_tokens"}


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
    """Return x: weighted tokens in units of `unit_tokens`, plus weighted calls and turns."""
    tokens = {
        "thinking": effort.thinking_tokens,
        "tool_call": effort.tool_call_tokens,
        "tool_output": effort.tool_output_tokens,
        "final": effort.final_tokens,
    }
    weighted = sum(weight * tokens[role] for role, weight in penalty.token_weights.items())
    return weighted / penalty.unit_tokens + penalty.per_tool_call * effort.tool_calls + penalty.per_turn * effort.turns


def length_penalty(effort: Effort, penalty: LengthPenalty) -> float:
    """Return the amount that is subtracted from the reward."""
    return penalty.weight * cost(effort_units(effort, penalty), penalty.k, penalty.q)


def charges(trajectory: Trajectory, penalty: LengthPenalty) -> dict[int, float]:
    """Return what each turn that sampled something owes, in order.

    Effort that the segments do not show is the last turn's: a tool's answer that no generation followed, or a turn that was cut
    off before its first token.
    """
    whole = length_penalty(trajectory.effort, penalty)
    spent = turn_efforts(trajectory)
    if not spent or whole == 0.0:
        return dict.fromkeys(spent, 0.0)
    grain = math.ulp(whole)  # multiples of it below `whole` add up without rounding
    owed, before, effort = {}, 0.0, Effort()
    last = list(spent)[-1]
    for turn, own in spent.items():
        effort = _sum(effort, own)
        after = whole if turn == last else math.floor(min(whole, length_penalty(effort, penalty)) / grain) * grain
        owed[turn] = max(0.0, after - before)
        before = max(before, after)
    return owed


def turn_efforts(trajectory: Trajectory) -> dict[int, Effort]:
    """Return the recorded effort of each turn that sampled something, in order. UNTOLD comes before all others."""
    counts: dict[int, dict[str, int]] = {}
    sampled: set[int] = set()
    for segment in trajectory.segments:
        for span in segment.spans:
            if span.role in SAMPLED and segment.loss_mask[span.start : span.end].any():
                sampled.add(span.turn)
            elif span.role != "tool_output":
                continue
            turn = counts.setdefault(span.turn, {})
            role = _FIELDS.get(span.role, "thinking_tokens")
            turn[role] = turn.get(role, 0) + span.end - span.start
            if span.role == "tool_call" or (span.role == "final" and span.tool):
                turn["tool_calls"] = turn.get("tool_calls", 0) + 1
        if untold := untold_tokens(segment):
            sampled.add(UNTOLD)
            turn = counts.setdefault(UNTOLD, {})
            turn["thinking_tokens"] = turn.get("thinking_tokens", 0) + untold
    return {turn: Effort(turns=int(turn != UNTOLD), **counts[turn]) for turn in sorted(sampled)}


def untold_tokens(segment: Segment) -> int:
    """Return how many sampled tokens no span covers."""
    told = np.zeros(len(segment.tokens), bool)
    for span in segment.spans:
        if span.role in SAMPLED:
            told[span.start : span.end] = True
    return int((segment.loss_mask & ~told).sum())


def _sum(*efforts: Effort) -> Effort:
    names: Sequence[str] = (
        "thinking_tokens",
        "tool_call_tokens",
        "tool_output_tokens",
        "final_tokens",
        "tool_calls",
        "turns",
    )
    return Effort(**{name: sum(getattr(effort, name) for effort in efforts) for name in names})
