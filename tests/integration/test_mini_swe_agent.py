"""mini-swe-agent as PyPI has it mends a repository through the recording endpoint; the trainer takes a step on its attempts.

`make agents` installs it in an environment of its own and runs this file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.contracts.messages import StopReason, Verdict
from shared.environments.repository.problem import RepositoryLimits
from tests.contract.sandboxes import NO_BWRAP
from tests.integration.test_foreign_agent import REPLIES, Found, attempted, graded
from tests.missing import reason
from tests.training import require_a_step, stored
from tests.unit.endpoint.world import Said, require_exact

AGENTS = Path(__file__).parents[2] / ".cache" / "agents"
MISSING = not (AGENTS / "mini/bin/mini").exists() and os.environ.get("ETUDE_TEST_AGENTS") != "require"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP),
    pytest.mark.skipif(MISSING, reason=reason(["mini-swe-agent"], "make agents")),
]
# docs/agents.md shows this command.
COMMAND = (
    "MSWEA_CONFIGURED=true MSWEA_GLOBAL_CONFIG_DIR=/tmp/mswea /opt/agents/mini/bin/python -I -m minisweagent.run.mini"
    " -y --exit-immediately -m openai/etude -o /tmp/mini.json -c mini.yaml -c model.cost_tracking=ignore_errors"
    ' -t "$(cat $ETUDE_TASK_FILE)"'
)
DONE: Said = ("Done.", [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})])


def mini(folder: Path, replies: list[Said]) -> Found:
    """Return an attempt of mini-swe-agent with the policy's replies, after every id was compared."""
    folder.mkdir()
    limits = RepositoryLimits(command_s=20.0, grading_s=60.0, seconds=900.0, memory_mb=3000)
    found = attempted(folder, COMMAND, replies, agents=AGENTS, context=16384, limits=limits)
    agent, work, policy, *_ = found
    assert work.stop is StopReason.submitted, work.notes
    assert work.notes["agent"].startswith("exit code 0"), work.notes["agent"]
    require_exact(agent.recording, policy)
    return found


def test_mini_swe_agent_unchanged_solves_a_task_and_is_trained(tmp_path: Path) -> None:
    solved, failed = mini(tmp_path / "solved", [*REPLIES[:2], DONE]), mini(tmp_path / "failed", [DONE])
    assert graded(solved) == Verdict(solved=True, passed=3, total=3)
    assert not graded(failed).solved
    assert [dict(found[0].recording.branches) for found in (solved, failed)] == [
        {"first": 1, "continues": 2},
        {"first": 1},
    ]
    made = [stored(i, found[0].recorder, found[0].effort) for i, found in enumerate((solved, failed))]
    sampled = sum(len(tokens) for found in (solved, failed) for _, tokens in found[2].seen)
    require_a_step(made, [1.0, 0.0], solved[2].renderer.vocab_size, sampled)
