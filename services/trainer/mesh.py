"""How the ranks of a trainer divide the work of a step.

    world = data x context            rank r: data part r // context; number r % context of those that share its sequences
    world = expert data x expert      rank r: replica r // expert of the experts; holds part r % expert of every layer's

Data parallel ranks train different units. Context parallel ranks train the same units, each a part of their tokens (see `context`).
Expert parallel ranks hold different experts and send each other the tokens that chose them (see `experts`). That division is apart
from the other: a group that shares experts may span data parts, context parts or both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


class BadMesh(ValueError):
    """The ranks cannot be divided so. The text names the setting of the service, what was found and what is allowed. `setting`:
    "context_ranks" or "expert_ranks"; `reason`: the text without it."""

    def __init__(self, setting: str, reason: str) -> None:
        super().__init__(f"ETUDE_TRAINER_{setting.upper()}: {reason}")
        self.setting, self.reason = setting, reason


@dataclass(frozen=True, slots=True)
class Mesh:
    """`data`, `context`: ranks along each axis. `expert`: ranks that hold a part of the experts each. `rank`: of this process, in
    the world."""

    rank: int = 0
    data: int = 1
    context: int = 1
    expert: int = 1

    @staticmethod
    def of(rank: int, world: int, context: int, expert: int = 1) -> Mesh:
        """Raise BadMesh if `context` or `expert` does not divide the world."""
        for setting, found in (("context_ranks", context), ("expert_ranks", expert)):
            if found < 1 or world % found:
                raise BadMesh(setting, f"found {found} of {world} ranks; allowed: {_divisors(world)}")
        return Mesh(rank, world // context, context, expert)

    def check_experts(self, experts: int) -> None:
        """Raise BadMesh unless each rank gets as many of a layer's `experts`. 0: the model has none."""
        if self.expert > 1 and (not experts or experts % self.expert):
            allowed = _divisors(math.gcd(experts, self.world)) if experts else "1"
            raise BadMesh("expert_ranks", f"found {self.expert} for a model with {experts} experts; allowed: {allowed}")

    @property
    def world(self) -> int:
        return self.data * self.context

    @property
    def data_rank(self) -> int:
        return self.rank // self.context

    @property
    def context_rank(self) -> int:
        return self.rank % self.context

    @property
    def expert_rank(self) -> int:
        """Which part of the experts this rank holds."""
        return self.rank % self.expert

    @property
    def context_groups(self) -> list[list[int]]:
        """The ranks that share their sequences, group by group."""
        return [list(range(first, first + self.context)) for first in range(0, self.world, self.context)]

    @property
    def expert_groups(self) -> list[list[int]]:
        """The ranks that hold all experts together, group by group."""
        return [list(range(first, first + self.expert)) for first in range(0, self.world, self.expert)]

    @property
    def expert_data_groups(self) -> list[list[int]]:
        """The ranks that hold the same experts, part by part."""
        return [list(range(first, self.world, self.expert)) for first in range(self.expert)]


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
