"""An attempt as ATIF, the Agent Trajectory Interchange Format, for other tools.

A sampled attempt is exported from its trajectory, with exact ids and log-probabilities. An attempt without training data is
exported from what was said, so that the document has no ids that no model sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from services.rollout.byhand.shown import View
from services.rollout.byhand.watched import Turn
from shared.environments import ToolSpec

SCHEMA = "ATIF-v1.8"


def document(view: View) -> dict[str, Any]:
    """Return the attempt as an ATIF document."""
    extra: dict[str, Any] = {"solved": view.solved, "outcome": view.outcome}
    if view.reward is not None:
        extra |= {"reward": view.reward, "terms": dict(view.terms)}
    if any(segment.loss_mask.any() for segment in view.trajectory.segments):
        from shared.contracts.atif import exported

        tools = [_spec(tool) for tool in view.tools]
        found: dict[str, Any] = exported(view.trajectory, view.renderer, model=view.policy, tools=tools, **extra)
        return found
    return _of_text(view, extra)


def _of_text(view: View, extra: dict[str, Any]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"source": said.role, "message": said.content} for said in view.opening]
    steps += [_step(turn) for turn in view.turns]
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    agent: dict[str, Any] = {"name": "etude", "version": "by-hand"}
    if view.policy:
        agent["model_name"] = view.policy
    if view.tools:
        agent["tool_definitions"] = list(view.tools)
    return {
        "schema_version": SCHEMA,
        "trajectory_id": view.title,
        "agent": agent,
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {**extra, "training_data": False},
    }


def _step(turn: Turn) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": turn.text, "llm_call_count": 1}
    if turn.thinking:
        step["reasoning_content"] = turn.thinking
    if calls := list(_calls(turn)):
        step["tool_calls"] = calls
    if turn.results:
        step["observation"] = {"results": list(_results(turn, calls))}
    return step


def _calls(turn: Turn) -> Iterator[dict[str, Any]]:
    for index, call in enumerate(turn.calls):
        arguments = call.arguments if isinstance(call.arguments, dict) else {}
        made: dict[str, Any] = {
            "tool_call_id": f"{turn.segment}.{turn.number}.{index}",
            "function_name": call.name or "unreadable",
            "arguments": arguments,
        }
        yield {**made, "extra": {"error": call.error}} if call.error else made


def _results(turn: Turn, calls: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, result in enumerate(turn.results):
        of = {"source_call_id": calls[index]["tool_call_id"]} if index < len(calls) else {}
        yield {**of, "content": result.text}


def _spec(tool: dict[str, Any]) -> ToolSpec:
    function = tool["function"]
    return ToolSpec(function["name"], function["description"], function["parameters"])
