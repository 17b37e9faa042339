"""Environments of `verifiers`, as PyPI has the package, roll out through the recording endpoint; the trainer takes a step.

`make agents` installs the package and docs/examples/verifiers in an environment of their own, and runs this file.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from services.reward.terms import environment_reward
from shared.contracts.messages import StopReason, Verdict
from shared.environments.verifiers.problem import VerifiersLimits
from shared.terms import Seen
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.verifiers_world import Found, attempted, environment_of, problem_of
from tests.missing import reason
from tests.training import require_a_step, stored
from tests.unit.endpoint.world import Said, require_exact

AGENTS = Path(__file__).parents[2] / ".cache" / "agents"
MISSING = (
    not [*AGENTS.glob("verifiers/lib/python*/site-packages/etude_sums.py")]
    and os.environ.get("ETUDE_TEST_AGENTS") != "require"
)
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP),
    pytest.mark.skipif(MISSING, reason=reason(["verifiers"], "make agents")),
]
LIMITS = VerifiersLimits(seconds=900.0, scoring_s=300.0)


def require_trained(solved: Found, failed: Found, rewards: list[float]) -> None:
    made = [stored(i, found[0].recorder, found[0].effort) for i, found in enumerate((solved, failed))]
    for trajectory, (_, work, *_) in zip(made, (solved, failed), strict=True):
        trajectory.notes = work.notes
    assert [environment_reward.find(Seen(one, {})).amount for one in made] == rewards
    sampled = sum(len(tokens) for found in (solved, failed) for _, tokens in found[2].seen)
    require_a_step(made, rewards, solved[2].renderer.vocab_size, sampled)


def test_a_tool_environment_rolls_out_is_scored_and_trained(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, AGENTS)
    problem = problem_of(environment, 3, environment="etude_sums", arguments={"seed": 5}, limits=LIMITS)
    first, second, third = (int(word) for word in problem.prompt.rstrip("?").split() if word.isdigit())
    replies: list[Said] = [
        ("I add.", [("add", {"a": first, "b": second})]),
        ("", [("add", {"a": first + second, "b": third})]),
        f"It is {first + second + third}.",
    ]
    solved = attempted(tmp_path / "solved", environment, problem, replies)
    failed = attempted(tmp_path / "failed", environment, problem, [("", [("add", {"a": 1, "b": 1})]), "It is 2."])
    for (agent, work, policy, _), turns in ((solved, 3), (failed, 2)):
        assert work.stop is StopReason.submitted, work.notes
        require_exact(agent.recording, policy)
        assert dict(agent.recording.branches) == {"first": 1, "continues": turns - 1}
    assert [found[3] for found in (solved, failed)] == [
        Verdict(solved=True, passed=1, total=1),
        Verdict(solved=False, passed=0, total=1),
    ]
    metrics = json.loads(solved[1].notes["environment_reward"])["metrics"]
    assert (metrics["right"], metrics["asked"], metrics["num_turns"]) == (1.0, 1.0, 3.0)
    require_trained(solved, failed, [1.25, 0.25])


def test_the_environment_that_verifiers_ships_for_reasoning_gym_is_scored_and_trained(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, AGENTS)
    problem = problem_of(environment, 4, environment="etude_gym", limits=LIMITS)
    # chain_sum of reasoning-gym: the last line is a sum of signed numbers, such as `12 + 3 - 4 =`.
    (line,) = re.findall(r"([0-9 +-]+)=", problem.prompt)
    result = sum(int(number.replace(" ", "")) for number in re.findall(r"[+-]? ?\d+", line))
    solved = attempted(tmp_path / "solved", environment, problem, [f"<answer>{result}</answer>"])
    failed = attempted(tmp_path / "failed", environment, problem, [f"<answer>{result + 1}</answer>"])
    for agent, work, policy, _ in (solved, failed):
        assert work.stop is StopReason.submitted, work.notes
        require_exact(agent.recording, policy)
        assert dict(agent.recording.branches) == {"first": 1}
    assert [found[3].solved for found in (solved, failed)] == [True, False]
    low = json.loads(failed[1].notes["environment_reward"])["reward"]
    assert 0.0 <= low < 1.0
    require_trained(solved, failed, [1.0, low])
