"""Trajectories as ATIF: real attempts, whole, and valid by the format's own package."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shared.contracts.atif import exported
from shared.contracts.trajectory import Trajectory
from shared.environments import ToolSpec
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer
from tests.guard.problems import FIXED_CONTEXT, fixed
from tests.guard.world import DENSE, play

TOOL = ToolSpec("edit", "Change a line.", {"type": "object", "properties": {"line": {"type": "integer"}}})


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Trajectory], Renderer]:
    state = tmp_path_factory.mktemp("world")
    outcomes = play(state, fixed(), 24, 3, context=FIXED_CONTEXT)
    return [outcome.trajectory for outcome in outcomes], load_renderer(state / DENSE)


def document(trajectory: Trajectory, renderer: Renderer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(exported(trajectory, renderer, model="p", tools=[TOOL], reward=0.5)))
    return found


def test_every_sampled_token_stands_in_a_step_with_its_log_probability(
    attempts: tuple[list[Trajectory], Renderer],
) -> None:
    trajectories, renderer = attempts
    calls = 0
    for trajectory in trajectories:
        steps = document(trajectory, renderer)["steps"]
        assert [step["step_id"] for step in steps] == list(range(1, len(steps) + 1))
        metrics = [step["metrics"] for step in steps if step["source"] == "agent"]
        masks = [segment.loss_mask for segment in trajectory.segments]
        for field, arrays in (
            ("completion_token_ids", [segment.tokens for segment in trajectory.segments]),
            ("logprobs", [segment.logprobs for segment in trajectory.segments]),
        ):
            kept = np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)])
            assert np.array_equal(np.asarray([one for step in metrics for one in step[field]], kept.dtype), kept)
        assert sum(step["source"] == "user" for step in steps) == len(trajectory.segments)
        for step in steps:
            known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            for result in step.get("observation", {}).get("results", ()):
                assert result.get("source_call_id") is None or result["source_call_id"] in known
            calls += len(known)
    assert calls > 0


def test_the_documents_are_valid_atif(attempts: tuple[list[Trajectory], Renderer]) -> None:
    atif = pytest.importorskip("atif")
    trajectories, renderer = attempts
    for trajectory in trajectories:
        made = document(trajectory, renderer)
        assert atif.Trajectory.model_validate(made).schema_version == "ATIF-v1.8"
        made["steps"][0]["step_id"] = 7
        with pytest.raises(ValueError, match="is not sequential"):
            atif.Trajectory.model_validate(made)
