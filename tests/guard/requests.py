"""Requests for attempts, drawn from a seed: problems, both purposes, both kinds of retry, small and large budgets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shared.contracts.messages import AttemptKey, RolloutRequested
from shared.contracts.run import Purpose, Ref, Sampling
from tests.guard.problems import Pair

DENSE, MOE = "r-guard-dense", "r-guard-moe"
SERIAL, FLOOR = 5, 3  # what the replicas serve, and the lowest version that training accepts
GROUP = 4  # attempts at a problem


@dataclass(frozen=True, slots=True)
class Packs:
    public: Ref
    hidden: Ref


def draw(pairs: Sequence[Pair], packs: Packs, count: int, seed: int, context: int) -> list[RolloutRequested]:
    """`count` requests, GROUP for each problem in turn. Equal arguments give equal requests."""
    rng = random.Random(seed)
    order = rng.sample(range(len(pairs)), len(pairs))
    made = []
    for i in range(count):
        problem, _ = pairs[order[i // GROUP % len(order)]]
        evaluate = rng.random() < 0.3
        key = AttemptKey(
            attempt=f"a-{seed}-{i:05d}",
            epoch=rng.choice((0, 0, 0, 2)),
            group=f"g-{seed}-{i // GROUP:04d}",
            problem=problem.id,
            index=i % GROUP,
            purpose=Purpose.evaluate if evaluate else Purpose.train,
        )
        made.append(
            RolloutRequested(
                run=rng.choice((DENSE, MOE)),
                key=key,
                policy_floor=FLOOR,
                pinned=SERIAL if evaluate else None,
                reward_config="default",
                sampling=_sampling(rng, context, evaluate),
                pack=packs.public,
                pack_hidden=packs.hidden,
                seed=rng.choice((0, 7)),
            )
        )
    return made


def _sampling(rng: random.Random, context: int, evaluate: bool) -> Sampling:
    return Sampling(
        temperature=0.0 if evaluate else rng.choice((1.0, 0.7)),
        retry=rng.choice(("fresh", "append")),
        max_completion_tokens=rng.choice((8, context // 16, context // 4, context // 2, *[4 * context] * 4)),
        max_turns=rng.choice((1, 2, 4, 6, 12, 12, 24, 24)),
        max_edits=rng.choice((1, 2, 2, 3, 4, 8, 16)),
        max_repeats=rng.choice((0, 1, 6, 6, 6)),
        summary_trigger_tokens=rng.choice((0, 0, 0, 0, 1, context // 3, context // 2)),
    )
