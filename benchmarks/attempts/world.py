"""Attempts without a server: the shipped agent, workspace, recorder and checkpoints, a seeded policy, and objects in memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from services.rollout.agent import Agent
from services.rollout.fleet import Wanted
from services.rollout.generation import Generation
from services.rollout.keeping import Keeper
from shared.contracts.messages import AttemptCheckpointed, AttemptKey, RolloutRequested
from shared.contracts.run import Ref, Sampling
from shared.environments.function.actions import Observation, Tool
from shared.environments.function.workspace import FunctionWorkspace
from shared.objects import ObjectMissing
from shared.problems import FunctionProblem
from shared.renderers import Renderer

RUN, LAYERS, TOP_K = "r-world", 2, 2
_NONE = Ref(key="", size=0, checksum="")
Policy = Callable[[list[int], int, random.Random], tuple[list[int], str]]  # context, room, rng -> tokens, finish


def rng_of(*facts: object) -> random.Random:
    return random.Random(xxhash.xxh3_128_intdigest(msgspec.json.encode(facts)))


class Memory:
    """Implements the part of shared.objects.Objects that checkpoints use."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> Ref:
        self.data[key] = data
        return Ref(key=key, size=len(data), checksum=xxhash.xxh3_128_hexdigest(data))

    def get(self, ref: Ref) -> bytes:
        try:
            return self.data[ref.key]
        except KeyError:
            raise ObjectMissing(ref.key) from None

    def list(self, prefix: str) -> Iterator[str]:
        return iter([key for key in self.data if key.startswith(prefix)])

    def delete(self, key: str) -> None:
        self.data.pop(key, None)


class Tests:
    """Visible tests that pass for no files."""

    async def run(self, problem: FunctionProblem, files: dict[str, str]) -> Observation:
        return Observation(Tool.test, failing=0, got="0")


@dataclass
class Talk:
    """Stands in for services.rollout.inference.Session: a generation is a function of its context, `life` and the seed.
    `before`: called with the number of tokens to come before each answer; what it raises ends the generation."""

    policy: Policy
    facts: tuple[object, ...]
    moe: bool = False
    before: Callable[[int], Any] = lambda _: None
    requests: int = 0
    partial: Generation | None = None
    begun: Generation | None = None
    wanted: Wanted = field(default_factory=lambda: Wanted(RUN, "g", 0))

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        rng = rng_of(*self.facts, tokens, max_new_tokens)
        sampled, finish = self.policy(tokens, max_new_tokens, rng)
        n, rows = len(sampled), len(tokens) + len(sampled) - 1 - first_row
        whole = Generation(
            tokens=sampled,
            logprobs_N=-np.array([rng.randrange(512) for _ in range(n)], np.float32) / 64,
            versions_N=np.full(n, rng.randint(3, 5), np.int32),
            oldest_kv_version=3,
            experts_RLK=np.frombuffer(rng.randbytes(rows * LAYERS * TOP_K), np.uint8).reshape(rows, LAYERS, TOP_K)
            if self.moe
            else None,
            finish=finish,
        )
        self.requests += 1
        if (done := self.begun) is not None:
            assert sampled[: len(done.tokens)] == done.tokens, "the next worker was given other tokens"
        self.before(n)
        self.begun = None
        return whole


@dataclass
class World:
    """One attempt after the other, each over as many lives as it takes."""

    renderer: Renderer
    policy: Policy
    objects: Memory = field(default_factory=Memory)
    tests: Any = field(default_factory=Tests)
    announced: dict[str, AttemptCheckpointed] = field(default_factory=dict)

    def request(
        self, attempt: str, sampling: Sampling, *, epoch: int = 0, checkpoint: Ref | None = None
    ) -> RolloutRequested:
        key = AttemptKey(attempt=attempt, epoch=epoch, group="g", problem="p")
        return RolloutRequested(
            run=RUN,
            key=key,
            policy_floor=0,
            reward_config="default",
            sampling=sampling,
            pack=_NONE,
            pack_hidden=_NONE,
            checkpoint=checkpoint,
        )

    async def announce(self, message: AttemptCheckpointed) -> None:
        self.announced[message.key.attempt] = message

    def keeper(self, request: RolloutRequested, every_s: float, clock: Callable[[], float]) -> Keeper:
        return Keeper(self.objects, request, "w", every_s, self.announce, clock=clock)  # type: ignore[arg-type]

    async def begun(self, keeper: Keeper, talk: Talk, problem: FunctionProblem) -> Agent:
        async def opened() -> FunctionWorkspace:
            return FunctionWorkspace(problem, keeper.request.sampling, self.tests)

        return await keeper.begun(self.renderer, talk, await opened(), opened)  # type: ignore[arg-type]
