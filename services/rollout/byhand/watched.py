"""The agent of a run, with its turns told to a person as they happen and kept as text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.rollout.agent import Agent
from services.rollout.generation import Generation
from shared.environments import Call, Result
from shared.renderers import Exchange, Reading


class CallMade(msgspec.Struct, frozen=True, kw_only=True):
    """`error`: why the call could not be read or executed as it was written; empty: it could."""

    name: str
    arguments: Any = None
    error: str = ""


class ResultSeen(msgspec.Struct, frozen=True, kw_only=True):
    """`ran`: False where the workspace passed over the call. `passed`: of a test alone."""

    tool: str
    text: str
    ok: bool = True
    ran: bool = True
    passed: bool | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One generation and what it brought. `versions`: the oldest and the newest that sampled it. The two times are in seconds,
    0 where nobody measured them. `restarts`: the agent forgets the turn and begins a new segment."""

    number: int
    segment: int
    thinking: str = ""
    text: str = ""
    calls: list[CallMade] = []
    results: list[ResultSeen] = []
    tokens: int = 0
    versions: tuple[int, int] = (0, 0)
    sampling_s: float = 0.0
    acting_s: float = 0.0
    finish: str = "stop"
    fault: str = ""
    restarts: bool = False


def _nothing(*_: Any) -> None:
    return None


@dataclass(slots=True)
class Watched(Agent):
    """`asking` is called with the number of the turn when the model is asked, `told` with each turn that is over."""

    asking: Callable[[int], None] = _nothing
    told: Callable[[Turn], None] = _nothing
    turns: list[Turn] = field(default_factory=list)
    segment: int = -1
    sampling_s: float = 0.0  # of the last generation

    # A dataclass with slots is made a second time, so `super()` without arguments finds the wrong class.

    def begin(self, summary: Sequence[int] = (), *, history: Sequence[Exchange] = ()) -> None:
        Agent.begin(self, summary, history=history)
        self.segment += 1

    async def ask(self, context: list[int]) -> Generation:
        self.asking(self.spent["turns"] + 1)
        started = time.monotonic()
        generation = await Agent.ask(self, context)
        self.sampling_s = time.monotonic() - started
        return generation

    async def act(self, generation: Generation, reading: Reading) -> list[Result]:
        started = time.monotonic()
        results: list[Result] = []
        try:
            results = await Agent.act(self, generation, reading)
            return results
        finally:
            turn = turn_of(
                reading,
                results,
                number=self.spent["turns"],
                segment=self.segment,
                tokens=len(generation.tokens),
                versions=(int(generation.versions_N.min()), int(generation.versions_N.max())),
                sampling_s=self.sampling_s,
                acting_s=time.monotonic() - started,
                finish=generation.finish,
            )
            self.turns.append(turn)
            self.told(turn)


def turn_of(reading: Reading, results: Sequence[Result], **facts: Any) -> Turn:
    """Return a turn as text. `facts`: the fields that neither says."""
    return Turn(
        thinking=reading.thinking,
        text=reading.text,
        calls=[call_made(call) for call in reading.calls],
        results=[
            ResultSeen(tool=result.tool, text=result.text, ok=result.ok, ran=result.ran, passed=result.passed)
            for result in results
            if result.text or result.tool or not result.ok
        ],
        fault=next((result.fault for result in reversed(results) if result.fault), ""),
        restarts=any(result.restart for result in results),
        **facts,
    )


def call_made(call: Call) -> CallMade:
    return CallMade(name=call.name, arguments=dict(call.arguments), error=call.error or "")
