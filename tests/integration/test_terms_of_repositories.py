"""Behaviour terms on attempts at a repository, from the agent's own loop to what a grader finds in the recorded tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.reward.behaviour import Behaviour
from services.reward.grade import look_of
from services.reward.term_workers import TermWorkers
from services.rollout.agent import Agent
from services.rollout.byhand.scripted import CallSaid, Reply, Scripted
from shared.contracts.graded import Finding
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Trajectory, pack
from shared.environments.repository.problem import RepositoryLimits
from shared.renderers.registry import load_renderer
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import Laboratory
from tests.renderer_checkpoints import checkpoint

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)

TOOLS = ["read", "grep", "edit", "write", "shell", "todo", "submit"]
MEND: tuple[str, dict[str, Any]] = ("edit", {"path": "calc.py", "old": "a - b", "new": "a + b  # wait, is this right"})


def turn(text: str, *calls: tuple[str, dict[str, Any]]) -> Reply:
    return Reply(text=text, calls=[CallSaid(name=name, arguments=arguments) for name, arguments in calls])


def run(command: str) -> tuple[str, dict[str, Any]]:
    return "shell", {"command": command}


SUBMIT: tuple[str, dict[str, Any]] = ("submit", {})


@pytest.fixture(scope="module")
def workers() -> Iterator[TermWorkers]:
    made = TermWorkers(term_s=20.0)
    yield made
    made.close()


def looked_at(folder: Path, workers: TermWorkers, *replies: Reply) -> Behaviour:
    """Play the replies, and compute all terms from what was recorded."""
    lab = Laboratory(folder)
    limits = RepositoryLimits(turns=20, tokens=100_000, command_s=20.0)
    problem = lab.problem(tools=TOOLS, limits=limits)
    base = checkpoint(folder / "base", "qwen2_5", {"format": "chatml", "context": 1 << 17, "tools": "short"})
    renderer = load_renderer(base)

    async def attempt() -> Trajectory:
        async with lab.attempt(problem) as workspace:
            agent = Agent(renderer, Scripted(list(replies), renderer), workspace, Sampling())
            stop = await agent.run()
            work = await workspace.submission()
            key = AttemptKey(attempt="a", epoch=0, group="g", problem=problem.id)
            return Trajectory(
                key=key, stop=stop, temperature=1.0, effort=agent.effort, segments=agent.recorder.segments(),
                changes=work.changes, notes=dict(workspace.notes),
            )  # fmt: skip

    trajectory = asyncio.run(attempt())
    given = lab.environment.given(problem, list(trajectory.changes))
    return workers.look(look_of(pack(trajectory), given, lab.environment.brief(problem), str(base), ""))


def test_an_attempt_in_the_terminal_with_a_false_claim_and_an_open_list_is_told_so(
    tmp_path: Path, workers: TermWorkers
) -> None:
    found = looked_at(
        tmp_path,
        workers,
        turn("", run("ls")),
        turn("", run("sed -i 's/a - b/a + b/' calc.py")),
        turn("", run("cat calc.py"), ("todo", {"open": ["mend the units"]})),
        turn("", run("touch debug_units.py && echo 'l = 1 ' > debug_units.py")),
        turn("I fixed it and all tests pass. Would you like me to go on?", SUBMIT),
    )
    assert found.quarantined == {}
    assert found.findings["todo_unfinished"] == Finding(1.0, ["left open: mend the units"])
    assert found.findings["terminal_only"] == Finding(1.0, ["4 calls, all of them in the terminal"])
    assert found.findings["untruthful_final"].evidence[0].endswith("but no test was run")
    assert found.findings["untruthful_final"].evidence[0].startswith("turn 5: claims ")
    assert found.findings["needless_question"].amount == 1
    assert found.findings["out_of_scope"].evidence == [
        "added debug_units.py: a scratch file, and the task does not name it"
    ]
    assert [piece.split()[1] for piece in found.findings["style"].evidence] == ["E741", "W291"]


def test_a_careful_attempt_has_only_the_findings_that_it_earns(tmp_path: Path, workers: TermWorkers) -> None:
    units = ("edit", {"path": "units.py", "old": '"km": 100,', "new": '"km": 1000,'})
    found = looked_at(
        tmp_path,
        workers,
        turn("I look first.", ("read", {"path": "calc.py"}), ("grep", {"pattern": "FACTORS"})),
        turn("", MEND, units),
        turn("", run("pytest -q -p no:cacheprovider tests")),
        turn("", ("todo", {"open": [], "done": ["all"]})),
        turn("Both are repaired; all tests pass.", SUBMIT),
    )
    assert found.quarantined == {}
    assert found.findings == {
        "thoughts_in_comments": Finding(1.0, ["calc.py:7: # wait, is this right"]),
    }


def test_reading_one_file_after_the_other_is_found_in_recorded_tokens(tmp_path: Path, workers: TermWorkers) -> None:
    found = looked_at(
        tmp_path,
        workers,
        turn("I read calc.py, then README.md.", ("read", {"path": "calc.py"})),
        turn("", ("read", {"path": "README.md"})),
        turn("", SUBMIT),
    )
    assert found.findings["serial_reads"].amount == 1
    assert found.findings["serial_reads"].evidence[0].startswith("segment 0, tokens ")
