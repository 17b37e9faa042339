"""A trajectory as ATIF, the Agent Trajectory Interchange Format, version 1.8: JSON for other tools. Pure.

A context that a segment begins with is one step of the user; every generation is one step of the agent, with the exact ids
that it sampled and their log-probabilities. What was sampled as a call is a tool call, and what stands behind it until the next
generation is its observation. A segment that begins after the first repeats what was said before, and is marked as copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shared.contracts.trajectory import Segment, Span, Trajectory

if TYPE_CHECKING:
    from shared.environments import Call, ToolSpec
    from shared.renderers import Renderer

SCHEMA = "ATIF-v1.8"


def exported(
    trajectory: Trajectory, renderer: Renderer, *, model: str = "", tools: Sequence[ToolSpec] = (), **extra: Any
) -> dict[str, Any]:
    """Return the trajectory as an ATIF document. `model`: the policy's name; empty: unknown. `tools`: what the agent was
    offered. `extra`: more facts for the document, such as its reward; each has to be JSON."""
    steps: list[dict[str, Any]] = []
    for number, segment in enumerate(trajectory.segments):
        steps += _steps(number, segment, renderer)
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    agent: dict[str, Any] = {"name": "etude", "version": _version()}
    if model:
        agent["model_name"] = model
    if tools:
        agent["tool_definitions"] = [_definition(tool) for tool in tools]
    return {
        "schema_version": SCHEMA,
        "trajectory_id": f"{trajectory.key.attempt}-{trajectory.key.epoch}",
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(one["prompt_tokens"] for one in metrics),
            "total_completion_tokens": sum(one["completion_tokens"] for one in metrics),
            "total_steps": len(steps),
        },
        "extra": {
            "key": msgspec.to_builtins(trajectory.key),
            "stop": trajectory.stop.value,
            "temperature": trajectory.temperature,
            "effort": msgspec.to_builtins(trajectory.effort),
            "notes": trajectory.notes,
            "changed": sorted(trajectory.changes or trajectory.files),
            **extra,
        },
    }


def _definition(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _version() -> str:
    try:
        return version("etude")
    except PackageNotFoundError:
        return "unknown"


def _steps(number: int, segment: Segment, renderer: Renderer) -> Iterator[dict[str, Any]]:
    tokens = [int(token) for token in segment.tokens]
    runs = list(_sampled(segment))
    end = runs[0][0] if runs else len(tokens)
    opening: dict[str, Any] = {"source": "user", "message": renderer.text(tokens[:end]), "extra": {"segment": number}}
    if number:
        opening["is_copied_context"] = True
    yield opening
    for turn, (start, stop) in enumerate(runs):
        behind = runs[turn + 1][0] if turn + 1 < len(runs) else len(tokens)
        yield _generation(f"{number}.{turn}", segment, tokens, (start, stop, behind), renderer)


def _sampled(segment: Segment) -> Iterator[tuple[int, int]]:
    """The ranges of sampled tokens: one for each generation, for an answer stands between two."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], segment.loss_mask.astype(np.int8), [0]))))
    yield from ((int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True))


def _generation(
    name: str, segment: Segment, tokens: list[int], place: tuple[int, int, int], renderer: Renderer
) -> dict[str, Any]:
    start, stop, behind = place
    completion = tokens[start:stop]
    reading = renderer.reading(completion, tokens[:start])
    spans = [span for span in segment.spans if start <= span.start < stop]
    step: dict[str, Any] = {
        "source": "agent",
        "message": reading.text if reading.text or reading.calls or reading.thinking else renderer.text(completion),
        "llm_call_count": 1,
        "metrics": {
            "prompt_tokens": start,
            "completion_tokens": len(completion),
            "completion_token_ids": completion,
            "logprobs": [float(logprob) for logprob in segment.logprobs[start:stop]],
            "extra": {"versions": [int(serial) for serial in segment.versions[start:stop]]},
        },
        "extra": {"roles": list(dict.fromkeys(span.role for span in spans))},
    }
    if reading.thinking:
        step["reasoning_content"] = reading.thinking
    calls = [_call(f"{name}.{index}", call) for index, call in enumerate(reading.calls)]
    if calls:
        step["tool_calls"] = calls
    if results := _results(segment.spans, tokens, (stop, behind), calls, renderer):
        step["observation"] = {"results": results}
    return step


def _call(name: str, call: Call) -> dict[str, Any]:
    """A call that could not be read has the reason, and whatever of it could."""
    arguments = call.arguments if isinstance(call.arguments, dict) else dict(call.arguments or {})
    step: dict[str, Any] = {"tool_call_id": name, "function_name": call.name or "unreadable", "arguments": arguments}
    if call.error is not None:
        step["extra"] = {"error": call.error}
    return step


def _results(
    spans: Sequence[Span],
    tokens: list[int],
    place: tuple[int, int],
    calls: Sequence[dict[str, Any]],
    renderer: Renderer,
) -> list[dict[str, Any]]:
    """The answers behind a generation: one for each call where they can be told apart."""
    stop, behind = place
    outputs = [(span.start, span.end) for span in spans if span.role == "tool_output" and stop <= span.start < behind]
    if not outputs and behind > stop:
        outputs = [(stop, behind)]
    known = len(outputs) == len(calls)
    results = []
    for index, (start, end) in enumerate(outputs):
        result: dict[str, Any] = {"content": renderer.text(tokens[start:end])}
        if known:
            result["source_call_id"] = calls[index]["tool_call_id"]
        results.append(result)
    return results
