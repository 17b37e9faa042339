"""The reward that an environment gave becomes the attempt's, solved or not, with the configuration that docs/agents.md shows."""

from __future__ import annotations

import json

import msgspec
import pytest

from services.reward.behaviour import observed
from services.reward.score import check, score
from shared.contracts.messages import AttemptKey, Effort, StopReason, Verdict
from shared.contracts.run import RewardConfig
from shared.contracts.trajectory import Trajectory
from shared.terms import Seen

CONFIG = """
{"reward": {"id": "rubric", "solved": 0, "length": null, "behaviour_apply": "all",
            "behaviour": {"environment_reward": 1, "broken_tool_call": 0, "no_submit": 0}}}
"""


def trajectory(**notes: str) -> Trajectory:
    key = AttemptKey(attempt="a", epoch=0, group="g", problem="p", index=0)
    return Trajectory(key=key, stop=StopReason.submitted, temperature=1.0, effort=Effort(), segments=[], notes=notes)


@pytest.mark.parametrize(
    ("notes", "reward"),
    [
        ({"environment_reward": '{"reward": 0.4, "metrics": {"right": 0.4}, "turns": 2, "error": ""}'}, 0.4),
        ({"environment_reward": '{"reward": -1.5, "metrics": {}}'}, -1.5),
        ({"environment_reward": '{"reward": null, "error": "no reward: ValueError"}'}, 0.0),
        ({}, 0.0),
    ],
)
@pytest.mark.parametrize("solved", [True, False])
def test_the_environments_reward_is_the_attempts(notes: dict[str, str], reward: float, solved: bool) -> None:
    config = msgspec.convert(json.loads(CONFIG)["reward"], RewardConfig)
    check(config)
    found = observed(Seen(trajectory(**notes), {}), ["environment_reward"])
    assert not found.quarantined
    total, _ = score(config, Verdict(solved=solved, passed=0, total=1), Effort(), found.findings)
    assert total == reward


def test_a_note_that_is_no_reward_quarantines_the_term() -> None:
    found = observed(Seen(trajectory(environment_reward="much"), {}), ["environment_reward"])
    assert list(found.quarantined) == ["environment_reward"]
