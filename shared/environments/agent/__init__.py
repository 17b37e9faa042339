"""The environment of kind `agent`: a repository in which a command-line agent of others works, inside the sandbox.

The agent is a shell command. It speaks OpenAI's or Anthropic's API to an address that its environment names, and finds the task in
a file. What it leaves in the tree is graded as in kind `repository`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import Brief, Call, InfrastructureError, Limits, Message, Result, SandboxGone, Way, Workspace
from shared.environments.agent.bridge import PORT, Bridge
from shared.environments.repository import RepositoryEnvironment, runtime
from shared.environments.repository.files import FileError
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.repository.workspace import RepositoryWorkspace
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import Base, Cause, Decision

AGENTS = "/opt/agents"  # where sandboxes see the folder of the setting ETUDE_SANDBOX_AGENTS
TASK = "/tmp/etude-task.md"
_LONGEST_S = 24 * 3600.0
_SHOWN = 2000  # characters of the agent's last output


class AgentProblem(RepositoryProblem, frozen=True, kw_only=True):
    """As `repository`, without `tools`. `agent`: the shell command that runs in `workdir`."""

    kind: Literal["agent"] = "agent"  # type: ignore[assignment]
    agent: str


class AgentHidden(RepositoryHidden, frozen=True, kw_only=True):
    kind: Literal["agent"] = "agent"  # type: ignore[assignment]


def with_agent(problem: RepositoryProblem, hidden: RepositoryHidden, command: str) -> tuple[AgentProblem, AgentHidden]:
    """Return a problem of kind `repository` as one in which the command is the agent. `tools` are left out: it has its own."""
    fields = {
        name: getattr(problem, name) for name in problem.__struct_fields__ if name not in ("kind", "tools", "agent")
    }
    secret = {name: getattr(hidden, name) for name in hidden.__struct_fields__ if name != "kind"}
    return AgentProblem(**fields, agent=command), AgentHidden(**secret)


class AgentEnvironment(RepositoryEnvironment):
    """See shared.environments.Environment."""

    kind = "agent"
    problem = AgentProblem
    hidden = AgentHidden

    def objection(self, problem: RepositoryProblem) -> str | None:
        if not isinstance(problem, AgentProblem) or not problem.agent.strip():
            return "field 'agent': found no command; allowed: a shell command that starts the agent"
        if problem.tools:
            return f"field 'tools': found {problem.tools[0]!r:.60}; allowed: none, since the agent brings its own"
        return super().objection(problem)

    def brief(self, problem: RepositoryProblem) -> Brief:
        return Brief((Message("user", problem.prompt),), ())

    async def open(self, problem: RepositoryProblem, sampling: Sampling) -> Workspace:
        inner = await super().open(problem, sampling)
        assert isinstance(problem, AgentProblem)
        assert isinstance(inner, RepositoryWorkspace)
        return AgentWorkspace(inner, problem)

    async def _base(self, problem: RepositoryProblem | None, image: str) -> Base:
        base = await super()._base(problem, image)
        folder: Path | None = self._places.agents
        return base if folder is None else replace(base, mounts=(*base.mounts, (folder.absolute(), AGENTS)))


class AgentWorkspace(Workspace):
    """See shared.environments.Workspace and Driven. It offers no tools: the agent inside has its own."""

    def __init__(self, inner: RepositoryWorkspace, problem: AgentProblem) -> None:
        self._inner, self._problem = inner, problem
        self.limits: Limits = inner.limits
        self.notes = inner.notes

    @property
    def decisions(self) -> Sequence[Decision]:
        return self._inner.decisions

    def brief(self, *, continues: bool = False) -> Brief:
        return self._inner.brief(continues=continues)

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        return await self._inner.call(calls)

    async def final(self, text: str) -> Result | None:
        return None

    async def drive(self, way: Way) -> None:
        try:
            await self._drive(way)
        except SandboxUnavailable as error:
            raise SandboxGone(str(error)) from None

    async def _drive(self, way: Way) -> None:
        from shared.sandbox.egress.environment import direct  # not before: a worker without a network needs no proxy

        sandbox = self._inner.sandbox
        try:
            await self._inner.box.files.write(TASK, self._problem.prompt.encode())
        except FileError as error:
            raise InfrastructureError(f"{TASK}: {error}") from None
        environment = {
            "OPENAI_BASE_URL": f"http://127.0.0.1:{PORT}/v1",
            "OPENAI_API_BASE": f"http://127.0.0.1:{PORT}/v1",  # LiteLLM's name for it
            "OPENAI_API_KEY": way.key,
            "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{PORT}",
            "ANTHROPIC_API_KEY": way.key,
            "ETUDE_TASK_FILE": TASK,
            **direct(),
        }
        async with Bridge(sandbox, way.connect, runtime.python(self._problem.image)):
            session = await sandbox.session()
            try:
                done = await session.run(
                    f"({self._problem.agent}\n) </dev/null 2>&1",
                    time_s=self.limits.seconds or _LONGEST_S,
                    env=environment,
                    cwd=self._problem.folder,
                )
            finally:
                await session.close()
        ended = f"exit code {done.exit_code}" if done.cause is Cause.exited else done.cause.value
        said = done.stdout.decode("utf-8", "replace")[-_SHOWN:]
        self.notes["agent"] = f"{ended}\n{said}"

    async def submission(self) -> Submission:
        return await self._inner.submission()

    async def close(self) -> None:
        await self._inner.close()
