"""A Harbor task with an agent of others and the task's own verifier: imported, admitted, attempted and graded."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
import shutil
from pathlib import Path

import pytest

from services.curator import own
from shared.contracts.messages import StopReason
from shared.environments import Grading
from shared.environments.agent import AgentEnvironment
from shared.environments.repository import trees
from shared.objects.directory import DirectoryObjects
from shared.problems.importing import STORE
from tests.contract.sandboxes import NO_BWRAP
from tests.datasets import harbor
from tests.integration.test_foreign_agent import AGENT, played
from tests.laboratory import Laboratory
from tests.unit.endpoint.world import Said, require_exact

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)]

COMMAND = f"python3 -c {shlex.quote(AGENT)}"
WRITE = "python3 -c \"print(open('first.txt').read().title(), end='')\" > second.txt"


def test_a_harbor_task_is_solved_by_an_agent_of_others_and_graded_by_its_own_verifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = trees.File(b"def teen(number):\n    return number % 100 in (11, 12, 13)\n")
    harbor.build(tmp_path / "tasks", {"inflection/__init__.py": package})
    for name in ("ordinals", "kebab"):
        shutil.rmtree(tmp_path / "tasks" / name)
    (first, second) = own.from_source("harbor", tmp_path / "tasks", None, agent=COMMAND).rows
    assert (first.problem.kind, second.problem.kind) == ("agent", "agent")
    assert "/workspace/first.txt" in second.problem.prompt
    lab = Laboratory(tmp_path)
    environment = AgentEnvironment(dataclasses.replace(lab.places, objects=DirectoryObjects(STORE)))
    (outcome,) = asyncio.run(environment.admit([(second.problem, second.hidden)]))
    assert (outcome.reason, outcome.proven) == ("", True)

    replies: list[Said] = [("", [("bash", {"command": WRITE})]), "It is written."]
    for said, solved in ((replies, True), (["I give up."], False)):
        agent, work, policy, *_ = played(tmp_path, environment, outcome.problem, said)
        assert work.stop is StopReason.submitted, work.notes
        require_exact(agent.recording, policy)
        (verdict,) = asyncio.run(environment.grade([Grading(outcome.problem, outcome.hidden, work.submission)]))
        assert verdict.solved is solved, verdict  # type: ignore[union-attr]
