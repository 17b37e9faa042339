"""Which rank computes which part of a step. Pure.

Invariants:
- Every sequence is computed once, by one rank.
- Every rank computes the same number of micro-batches (some may be empty): ZeRO 2 reduces gradients in every backward, and a rank
  that made one less would leave the others waiting.
- The same batch is dealt the same way on every rank: nobody has to be told.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from services.trainer.packing import Unit, cut, micro_batches
from shared.model import Transformer

GOOD = 1.03  # greatest cost over mean cost at which no unit is split any more


@dataclass(frozen=True, slots=True)
class Cost:
    """Arithmetic of a unit's forward: `per_token` for a fed token, `per_pair` for a pair of positions that attend."""

    per_token: float
    per_pair: float

    @staticmethod
    def of(model: Transformer) -> Cost:
        """Two operations for every weight that a token meets; q·k and the sum of values for every pair, head and layer."""
        shape = model.config
        used = shape.num_experts_per_tok
        weights = sum(
            p[0].numel() * used if p.dim() == 3 else p.numel() for p in model.parameters()
        )  # [experts, out, in]
        pairs = 2 * shape.num_attention_heads * (shape.head_dim + shape.v_head_dim) * shape.num_hidden_layers
        return Cost(2 * weights, pairs)

    def __call__(self, unit: Unit) -> float:
        pairs = unit.prefix * (unit.prefix + 1) / 2
        for s in unit.sequences:
            own = len(s.tokens_T) - 1 - unit.prefix
            pairs += own * unit.prefix + own * (own + 1) / 2
        return self.per_token * unit.fed + self.per_pair * pairs


def imbalance(hands: Sequence[Sequence[Unit]], cost: Cost) -> float:
    """Return the greatest cost of a rank over the mean of all; 1: they are equal."""
    costs = [sum(map(cost, hand)) for hand in hands]
    return max(costs) * len(costs) / sum(costs) if sum(costs) else 1.0


def deal(units: Sequence[Unit], ranks: int, most_tokens: int, cost: Cost) -> list[list[list[Unit]]]:
    """Return the micro-batches of each rank. `most_tokens`: fed tokens of a micro-batch (see packing.micro_batches)."""
    if ranks == 1:
        return [micro_batches(units, most_tokens)]
    hands = hand_out(units, ranks, most_tokens, cost)
    dealt = [micro_batches(hand, most_tokens) for hand in hands]
    longest = max(map(len, dealt))
    return [parts + [[] for _ in range(longest - len(parts))] for parts in dealt]


def hand_out(units: Sequence[Unit], ranks: int, most_tokens: int, cost: Cost) -> list[list[Unit]]:
    """Return the units of each rank. The costliest goes first, always to the rank that has least. Then, while one rank has
    too much, branches of one of its units move to the rank that has least, which computes their prefix again."""
    parts = sorted((part for unit in units for part in cut(unit, most_tokens)), key=cost, reverse=True)
    heap = [(0.0, rank) for rank in range(ranks)]
    hands: list[list[Unit]] = [[] for _ in range(ranks)]
    for part in parts:
        spent, rank = heapq.heappop(heap)
        hands[rank].append(part)
        heapq.heappush(heap, (spent + cost(part), rank))
    while imbalance(hands, cost) > GOOD:
        if not _even_out(hands, cost):
            break
    return hands


def _even_out(hands: list[list[Unit]], cost: Cost) -> bool:
    """Move branches once from the rank with most to the rank with least. Return whether that made the greatest cost smaller."""
    costs = [sum(map(cost, hand)) for hand in hands]
    full, empty = costs.index(max(costs)), costs.index(min(costs))
    best: tuple[float, int, Unit | None, Unit] | None = None
    for at, unit in enumerate(hands[full]):
        for count in range(1, len(unit.sequences) + 1):
            kept = Unit(unit.prefix, unit.sequences[count:]) if count < len(unit.sequences) else None
            moved = Unit(unit.prefix, unit.sequences[:count])
            after = costs[full] - cost(unit) + (cost(kept) if kept else 0.0)
            greatest = max(after, costs[empty] + cost(moved))
            if greatest < costs[full] and (best is None or greatest < best[0]):
                best = greatest, at, kept, moved
    if best is None:
        return False
    _, at, kept_unit, moved_unit = best
    hands[full][at : at + 1] = [kept_unit] if kept_unit else []
    hands[empty].append(moved_unit)
    return True
