"""An agent of others in an attempt by hand: its answers are told to a person as they happen, and kept as text."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.rollout.byhand.watched import Turn, turn_of
from services.rollout.endpoint.foreign import ForeignAgent
from services.rollout.endpoint.prompting import Prompt
from services.rollout.endpoint.recording import Over, Recording
from services.rollout.endpoint.server import Endpoint
from services.rollout.endpoint.tree import Node
from services.rollout.ends import TurnLimit
from services.rollout.generation import Generation
from shared.contracts.messages import StopReason
from shared.contracts.run import Sampling
from shared.environments import Driven, InfrastructureError, Workspace
from shared.renderers import Reading
from shared.renderers.chat import Chat


@dataclass(slots=True)
class _Watched(Recording):
    """`asking` is called with the number of the turn when the model is asked, `told` with each answer."""

    asking: Callable[[int], None] = lambda number: None
    told: Callable[[Turn], None] = lambda turn: None
    turns: list[Turn] = field(default_factory=list)
    sampling_s: float = 0.0  # of the last generation

    # A dataclass with slots is made a second time, so `super()` without arguments finds the wrong class.

    async def _generate(self, ids: list[int], most: int, first_row: int) -> Generation:
        self.asking(self.spent["turns"])
        started = time.monotonic()
        try:
            generation = await Recording._generate(self, ids, most, first_row)
        except TurnLimit:  # a script is over
            self.end(StopReason.turn_limit)
            raise Over(f"the attempt has ended ({self.ended})") from None
        self.sampling_s = time.monotonic() - started
        return generation

    def _record(self, prompt: Prompt, generation: Generation, reading: Reading) -> Node:
        node = Recording._record(self, prompt, generation, reading)
        versions = int(generation.versions_N.min()), int(generation.versions_N.max())
        facts: dict[str, Any] = {"tokens": len(generation.tokens), "versions": versions, "sampling_s": self.sampling_s}
        turn = turn_of(reading, [], number=node.turn, segment=0, finish=generation.finish, **facts)
        self.turns.append(turn)
        self.told(turn)
        return node


class WatchedForeign(ForeignAgent):
    """Stands where `Watched` stands for agents of ours."""

    recording: _Watched

    @property
    def turns(self) -> list[Turn]:
        return self.recording.turns


def watched_foreign(
    renderer: object,
    model: Any,
    workspace: Workspace,
    sampling: Sampling,
    asking: Callable[[int], None],
    told: Callable[[Turn], None],
) -> WatchedForeign:
    """Raises InfrastructureError where the policy's requests cannot be recorded as tokens."""
    assert isinstance(workspace, Driven)
    if not isinstance(renderer, Chat):
        raise InfrastructureError(
            "the problem brings an agent of its own, whose requests are recorded as tokens; allowed: a policy with a chat format "
            "(--policy CHECKPOINT, or a URL that takes token ids), or --scripted FILE"
        )
    recording = _Watched(
        renderer, model, workspace.limits, sampling.temperature, run="by-hand", asking=asking, told=told
    )
    return WatchedForeign(Endpoint(), workspace, recording)
