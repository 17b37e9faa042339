"""An attempt's tokens read back as turns: calls with their arguments, words for people, answers. Pure.

The renderer reads each generation as the agent loop read it. Nothing is recorded for this: an attempt of long ago can be read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from shared.contracts.graded import place
from shared.contracts.trajectory import Segment, Span, Trajectory
from shared.environments import ToolSpec
from shared.renderers import Renderer
from shared.terms import Made, Turn


def turns(trajectory: Trajectory, renderer: Renderer, tools: Sequence[ToolSpec]) -> tuple[Turn, ...]:
    """Return every generation of the attempt, in order."""
    found: list[Turn] = []
    for number, segment in enumerate(trajectory.segments):
        runs = list(_sampled(segment))
        for i, (start, end) in enumerate(runs):
            behind = runs[i + 1][0] if i + 1 < len(runs) else len(segment.tokens)
            found.append(_turn(number, segment, (start, end, behind), renderer, tools))
    return tuple(found)


def _sampled(segment: Segment) -> Iterator[tuple[int, int]]:
    """Yield the ranges of sampled tokens: one for each generation, for an answer stands between two."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], segment.loss_mask.astype(np.int8), [0]))))
    yield from ((int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def _turn(
    number: int, segment: Segment, at: tuple[int, int, int], renderer: Renderer, tools: Sequence[ToolSpec]
) -> Turn:
    start, end, behind = at
    tokens: list[int] = segment.tokens[:behind].tolist()
    spans = [span for span in segment.spans if start <= span.start < end]
    reading = renderer.reading(tokens[start:end], tokens[:start], tools)
    called = [span for span in spans if span.role == "tool_call" or (span.role == "final" and span.tool)]
    effects = {tool.name: tool.effect for tool in tools}
    turn = spans[0].turn if spans else 0
    calls = []
    for i, call in enumerate(reading.calls):
        span = called[i] if i < len(called) else None
        calls.append(_made(turn, call.name, effects.get(call.name, ""), call.arguments, span, number))
    output = renderer.text(tokens[end:behind]) if behind > end else ""
    return Turn(turn, reading.text, tuple(calls), output, reading.thinking)


def _made(turn: int, name: str, effect: str, arguments: object, span: Span | None, segment: int) -> Made:
    return Made(
        turn,
        name,
        effect,
        arguments if isinstance(arguments, dict) else {},
        span is None or span.ok,
        "" if span is None else place(segment, span.start, span.end),
    )
