"""Who is struck when. Pure: the same seed gives the same strikes, whatever the machine does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

VICTIMS = ("scheduler", "rollout", "reward", "inference", "trainer")


@dataclass(frozen=True, slots=True)
class Kill:
    """`after_s`: seconds after the strike before it."""

    after_s: float
    victim: str


def kills(seed: int, count: int, every_s: float, victims: Sequence[str] = VICTIMS) -> list[Kill]:
    """`count` kills, `every_s` apart in the mean. Every victim comes as often as the others, give or take one, in an order
    that says nothing about the next; gaps are exponential, as of events that know nothing of each other, within bounds."""
    if count < 0 or every_s <= 0 or not victims:
        raise ValueError(f"count {count}, every_s {every_s}, victims {list(victims)}: allowed: >= 0, > 0, at least one")
    random_ = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += random_.sample(list(victims), len(victims))
    return [Kill(min(3 * every_s, random_.expovariate(1 / every_s)), victim) for victim in order[:count]]
