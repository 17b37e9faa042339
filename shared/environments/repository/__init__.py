"""The environment of kind `repository`: an agent with tools in a source tree, graded by hidden tests.

What it needs of a service: sandboxes that live on, the object store that holds the trees, and a cache folder.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from shared.contracts.messages import Verdict
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import (
    Brief,
    Grading,
    InfrastructureError,
    Limits,
    Message,
    Outcome,
    Places,
    SandboxGone,
    Ungradable,
    Workspace,
    tools,
)
from shared.environments.repository import checks, grading, rooms, runtime
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.environments.tools import Hit, load
from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import WORKSPACE, Base, Sandboxes
from shared.sandbox.contract import Limits as SandboxLimits
from shared.together import together

if TYPE_CHECKING:
    from shared.environments.repository.index import Indexes

USUAL_TOOLS = ("read", "edit", "write", "list", "grep", "shell", "submit")
SYSTEM = "You are a coding agent. Solve the task in the repository {folder} with the tools, then call submit."
_CANARY_S = 120.0
_LONGEST_S = 24 * 3600.0  # of an attempt without a limit of its own
_SHOWN, _SHOWN_OUTPUT = 5, 500  # tests and lines, characters of a refusal


class RepositoryEnvironment:
    """See shared.environments.Environment."""

    kind = "repository"
    problem: type[RepositoryProblem] = RepositoryProblem
    hidden: type[RepositoryHidden] = RepositoryHidden

    def __init__(self, places: Places) -> None:
        from shared.environments.repository.unpacked import Unpacked

        self._places = places
        self._trees = Unpacked(places.objects, places.cache)
        self._gradings: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None  # see _room

    def objection(self, problem: RepositoryProblem) -> str | None:
        if wrong := checks.wrong_problem(problem):
            return f"field {wrong[0]!r}: {wrong[1]}"
        if wrong_room := rooms.objection(self._places, problem):
            return wrong_room
        if wrong_tool := tools.objection(problem.tools):
            return f"field 'tools': {wrong_tool}"
        if problem.tools and "submit" not in problem.tools:
            return "field 'tools': found no 'submit'; allowed: lists that hold it"
        if "web_search" in problem.tools:
            from shared.environments.tools import web_search

            if web_search.configured() is None:
                return f"field 'tools': found 'web_search'; allowed only where {web_search.VARIABLE} names a service"
        return None

    def brief(self, problem: RepositoryProblem) -> Brief:
        messages = (Message("system", SYSTEM.format(folder=problem.folder)), Message("user", problem.prompt))
        return Brief(messages, tuple(load(name).spec for name in problem.tools or USUAL_TOOLS))

    async def ready(self) -> None:
        try:
            image = await rooms.image_of(self._places, "")
            base = await self._base(None, image)
            sandbox = await self._sandboxes().open(base, SandboxLimits(memory_mb=2048, processes=32))
        except (ValueError, InfrastructureError) as error:
            raise SandboxUnavailable(str(error)) from None
        try:
            session = await sandbox.session()
            script = f"{runtime.python(image)} -c \"import pytest; print('ready')\""
            done = await session.run(script, time_s=_CANARY_S)
            if done.stdout != b"ready\n":
                said = (done.stdout + done.stderr).decode(errors="replace").strip()[-500:]
                raise SandboxUnavailable(f"no Python with pytest in a sandbox: exit code {done.exit_code}: {said}")
        finally:
            await sandbox.close()

    async def open(self, problem: RepositoryProblem, sampling: Sampling) -> Workspace:
        try:
            return await self._open(problem, sampling)
        except SandboxUnavailable as error:
            raise SandboxGone(str(error)) from None
        except OSError as error:
            raise InfrastructureError(f"{type(error).__name__}: {error}") from None

    def given(self, problem: RepositoryProblem, paths: Sequence[str]) -> Mapping[str, str]:
        return self._trees.texts(problem.tree, tuple(paths))

    def grading_s(self, problem: RepositoryProblem) -> float:
        return grading.RUNS * (problem.limits.grading_s + len(problem.setup) * grading.SETUP_S)

    async def grade(self, items: Sequence[Grading]) -> list[Verdict | Ungradable]:
        sandboxes = self._sandboxes()
        found = await together(self._graded(sandboxes, item) for item in items)
        lost = [one for one in found if isinstance(one, SandboxUnavailable)]
        if lost and len(lost) == len(found):
            raise lost[0]
        return [
            Ungradable(f"{type(one).__name__}: {one}") if isinstance(one, SandboxUnavailable) else one for one in found
        ]

    async def admit(self, pairs: Sequence[tuple[RepositoryProblem, RepositoryHidden]]) -> list[Outcome]:
        from shared.environments.admission import admitted

        outcomes = await admitted(self, pairs, self._objected)
        return await together(self._explained(outcome) for outcome in outcomes)

    async def _explained(self, outcome: Outcome) -> Outcome:
        """Add to the refusal of a solution which tests failed and what the runner printed last."""
        work = self.oracle(outcome.problem, outcome.hidden) if outcome.refused_by == "oracle" else None
        if work is None:
            return outcome
        try:
            async with self._room():
                report = (await self._report(self._sandboxes(), Grading(outcome.problem, outcome.hidden, work)))[1]
        except (InfrastructureError, SandboxUnavailable, OSError):
            return outcome
        names = (*outcome.hidden.fail_to_pass, *outcome.hidden.pass_to_pass)
        failed = [name for name in names if name not in report.passed]
        shown = ", ".join(failed[:_SHOWN]) + (f" and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else "")
        ending = " | ".join(report.output.strip().splitlines()[-_SHOWN:])
        return replace(
            outcome, reason=f"{outcome.reason}; not passed: {shown}; {outcome.hidden.runner}: {ending[-_SHOWN_OUTPUT:]}"
        )

    def oracle(self, problem: RepositoryProblem, hidden: RepositoryHidden) -> Submission | None:
        return Submission(changes=hidden.solution) if hidden.solution else None

    def cheats(self, problem: RepositoryProblem, hidden: RepositoryHidden) -> Mapping[str, Submission]:
        from shared.environments.repository import cheats

        return cheats.cheats(hidden, self.given(problem, cheats.sources(hidden)))

    def _objected(self, problem: RepositoryProblem, hidden: RepositoryHidden) -> str | None:
        """Say why the problem cannot be graded, as only the hidden part or the stored tree shows it."""
        if wrong := checks.wrong_hidden(hidden):
            return f"field {wrong[0]!r}: {wrong[1]}"
        try:
            self._trees.folder(problem.tree)
        except InfrastructureError as error:
            return f"field 'tree': {error}"
        return None

    async def _open(self, problem: RepositoryProblem, sampling: Sampling) -> Workspace:
        from shared.environments.repository.workspace import opened

        entries = await asyncio.to_thread(self._trees.entries, problem.tree)
        limits = grading.sandbox_limits(problem, problem.limits.seconds or _LONGEST_S)
        network = rooms.network(self._places, problem)
        problem = await rooms.furnished(self._places, problem)
        try:
            sandbox = await self._sandboxes().open(await self._base(problem, problem.image), limits, network)
        except ValueError as error:
            raise InfrastructureError(str(error)) from None
        try:
            await rooms.require_python(sandbox, problem.image)
            await grading.set_up(sandbox, problem)
            base = None if problem.setup else entries
            python = runtime.python(problem.image)
            workspace = await opened(
                sandbox, self.brief(problem), _limits(problem, sampling), base, problem.folder, python
            )
        except BaseException:
            await sandbox.close()
            raise
        workspace.box.command_s = problem.limits.command_s
        workspace.box.search = partial(self._search, problem)
        return workspace

    @cached_property
    def _indexes(self) -> Indexes:
        from shared.environments.repository.index import Indexes

        return Indexes(self._places.cache)

    async def _search(self, problem: RepositoryProblem, query: str, most: int) -> list[Hit]:
        """Search the tree as it was given."""
        indexes = self._indexes

        def search() -> list[Hit]:
            paths = [path for path, entry in self._trees.entries(problem.tree).items() if entry[0] == "file"]
            return indexes.of(self._trees.folder(problem.tree), paths).search(query, most)

        try:
            hits = await asyncio.to_thread(search)
        except (OSError, ValueError, ImportError) as error:
            raise InfrastructureError(f"search: {type(error).__name__}: {error}") from None
        return [replace(hit, path=f"{WORKSPACE}/{hit.path}") for hit in hits]

    def _room(self) -> asyncio.Semaphore:
        """Return the limit on gradings at a time, over all batches. It belongs to the running event loop, because a grader
        runs each of its jobs in a loop of its own."""
        loop = asyncio.get_running_loop()
        if self._gradings is None or self._gradings[0] is not loop:
            self._gradings = loop, asyncio.Semaphore(os.cpu_count() or 1)
        return self._gradings[1]

    async def _graded(self, sandboxes: Sandboxes, item: Grading) -> Verdict | Ungradable | SandboxUnavailable:
        """Return the answer for one item. SandboxUnavailable: its sandbox was lost, or there is none on this machine."""
        async with self._room():
            try:
                return (await self._report(sandboxes, item))[0]
            except SandboxUnavailable as error:
                return error
            except (InfrastructureError, OSError) as error:
                return Ungradable(f"{type(error).__name__}: {error}")

    async def _report(self, sandboxes: Sandboxes, item: Grading) -> tuple[Verdict, grading.Report]:
        tree = await asyncio.to_thread(self._trees.folder, item.problem.tree)
        cache, problem = self._places.cache, await rooms.furnished(self._places, item.problem)
        return await grading.graded(sandboxes, cache, tree, problem, item.hidden, item.submission)

    async def _base(self, problem: RepositoryProblem | None, image: str) -> Base:
        """`problem`: None: a sandbox without a tree."""
        tree = None if problem is None else await asyncio.to_thread(self._trees.folder, problem.tree)
        workdir = "." if problem is None else problem.workdir
        return await asyncio.to_thread(runtime.base, self._places.cache, tree, workdir, image)

    def _sandboxes(self) -> Sandboxes:
        if self._places.sandboxes is None:
            raise SandboxUnavailable("this service has no sandboxes for commands")
        return self._places.sandboxes


def _limits(problem: RepositoryProblem, sampling: Sampling) -> Limits:
    own = problem.limits
    return Limits(
        turns=own.turns or sampling.max_turns,
        tokens=own.tokens or sampling.max_completion_tokens,
        turn_tokens=own.turn_tokens or sampling.max_turn_tokens,
        seconds=own.seconds,
    )
