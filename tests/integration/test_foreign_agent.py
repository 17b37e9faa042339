"""An agent of others, inside the sandbox, mends a repository through the recording endpoint."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services.rollout.attempt import Work
from services.rollout.endpoint.foreign import ForeignAgent
from services.rollout.endpoint.history import Branch
from services.rollout.endpoint.server import Endpoint
from shared.contracts.messages import StopReason, Verdict
from shared.contracts.run import Sampling
from shared.environments import Driven, Grading, InfrastructureError
from shared.environments.agent import AgentEnvironment, AgentProblem, with_agent
from shared.environments.repository.problem import RepositoryLimits
from shared.environments.verifiers import VerifiersEnvironment
from shared.environments.verifiers.problem import VerifiersProblem
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import FILES, SOLUTION, Laboratory, hidden
from tests.patience import eventually
from tests.unit.endpoint.world import Policy, Said, renderer, require_exact

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)]

# An agent of a few lines: Python's own library, OpenAI's API, one tool.
AGENT = """
import json, os, subprocess, urllib.request
tool = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": open(os.environ["ETUDE_TASK_FILE"]).read()}]
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": [tool]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
    messages.append(said)
    if not said.get("tool_calls"):
        break
    for call in said["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr or "(none)"})
"""
MEND = [
    "sed -i 's/a - b/a + b/' calc.py",
    """sed -i 's/"km": 100,/"km": 1000,/' units.py""",
]
REPLIES: list[Said] = [
    ("I look.", [("bash", {"command": "cat calc.py"}), ("bash", {"command": "cat units.py"})]),
    ("", [("bash", {"command": command}) for command in MEND]),
    "Both are mended.",
]


def problem(lab: Laboratory, agent: str, **fields: Any) -> AgentProblem:
    limits = fields.pop("limits", RepositoryLimits(command_s=20.0, grading_s=60.0, seconds=200.0))
    return with_agent(lab.problem(FILES, limits=limits, **fields), hidden(), agent)[0]


E = TypeVar("E", AgentEnvironment, VerifiersEnvironment)
P = TypeVar("P", AgentProblem, VerifiersProblem)
Found = tuple[ForeignAgent, Work, Policy, AgentEnvironment, AgentProblem]


def attempted(
    folder: Path,
    agent: str,
    replies: list[Said],
    *,
    agents: Path | None = None,
    context: int = 4096,
    meanwhile: Callable[[Policy, ForeignAgent, asyncio.Task[StopReason]], Awaitable[None]] | None = None,
    **fields: Any,
) -> Found:
    lab = Laboratory(folder)
    environment = AgentEnvironment(dataclasses.replace(lab.places, agents=agents))
    return played(folder, environment, problem(lab, agent, **fields), replies, context=context, meanwhile=meanwhile)


def played(
    folder: Path,
    environment: E,
    task: P,
    replies: list[Said],
    *,
    context: int = 4096,
    meanwhile: Callable[[Policy, ForeignAgent, asyncio.Task[StopReason]], Awaitable[None]] | None = None,
) -> tuple[ForeignAgent, Work, Policy, E, P]:
    """Make an attempt at a problem whose environment drives an agent of its own."""
    assert environment.objection(task) is None
    chat = renderer(folder / "chat", card={"format": "chatml", "context": context})

    async def run() -> tuple[ForeignAgent, Work, Policy, E, P]:
        policy = Policy(chat, replies)
        workspace = await environment.open(task, Sampling(temperature=1.0, max_turns=20, max_completion_tokens=100_000))
        try:
            assert isinstance(workspace, Driven)
            made = ForeignAgent.of(Endpoint(), chat, policy, workspace, Sampling(temperature=1.0), "r-test")
            running = asyncio.ensure_future(made.run())
            if meanwhile is not None:
                await meanwhile(policy, made, running)
            stop = await running
            return made, Work(stop, await workspace.submission(), dict(workspace.notes)), policy, environment, task
        finally:
            await workspace.close()

    return asyncio.run(run())


def graded(found: Found) -> Any:
    _, work, _, environment, task = found
    secret = with_agent(task, hidden(), "")[1]
    return asyncio.run(environment.grade([Grading(task, secret, work.submission)]))[0]


def test_an_agent_inside_the_sandbox_solves_a_task_and_every_id_is_recorded(tmp_path: Path) -> None:
    proxied = "export http_proxy=http://127.0.0.1:9"  # as an image may: the endpoint is asked past it
    found = attempted(tmp_path, f"{proxied}; python3 -c {shlex.quote(AGENT)}", REPLIES)
    agent, work, policy, *_ = found
    assert work.stop is StopReason.submitted, work.notes
    assert work.notes["agent"].startswith("exit code 0"), work.notes["agent"]
    assert {path: work.submission.changes[path] for path in SOLUTION} == SOLUTION
    assert graded(found) == Verdict(solved=True, passed=3, total=3)
    require_exact(agent.recording, policy)
    assert agent.recording.branches == {Branch.first: 1, Branch.continues: 2}
    assert agent.effort.turns == 3
    assert agent.effort.tool_calls == 4
    assert json.loads(work.notes["endpoint"])["rewritten_share"] == 0.0


def test_an_agent_that_never_ends_is_submitted_at_the_limit(tmp_path: Path) -> None:
    endless = AGENT.replace("break", "messages.append({'role': 'user', 'content': 'Go on.'}); continue")
    agent, work, policy, *_ = attempted(tmp_path, f"python3 -c {shlex.quote(endless)}", ["Again."])
    assert work.stop is StopReason.turn_limit
    assert agent.effort.turns == 20
    require_exact(agent.recording, policy)


def test_a_deadline_ends_the_agent_while_it_waits_for_an_answer(tmp_path: Path) -> None:
    async def late(policy: Policy, agent: ForeignAgent, running: asyncio.Task[StopReason]) -> None:
        policy.free.clear()
        await eventually(lambda: policy.seen, "a question", 200)
        agent.deadline = True
        running.cancel()

    agent, work, policy, *_ = attempted(tmp_path, f"python3 -c {shlex.quote(AGENT)}", REPLIES, meanwhile=late)
    assert work.stop is StopReason.deadline
    assert policy.cancelled == 1
    assert not agent.recording.tree.nodes
    assert not agent.endpoint._open


def test_a_failure_of_the_engine_is_none_of_the_agents_doing(tmp_path: Path) -> None:
    async def broken(policy: Policy, agent: ForeignAgent, running: asyncio.Task[StopReason]) -> None:
        async def generate(*_: Any, **__: Any) -> Any:
            raise InfrastructureError("the engine burned down")

        policy.generate = generate  # type: ignore[method-assign]

    with pytest.raises(InfrastructureError, match="burned down"):
        attempted(tmp_path, f"python3 -c {shlex.quote(AGENT)}", REPLIES, meanwhile=broken)
