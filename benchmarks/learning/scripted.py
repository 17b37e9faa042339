"""A scripted solver, recorded by the product's agent: SFT traces whose ids and masks are what RL sees.

The tools are the environment's own. They work on files in memory (`MemoryWorkspace`): a sandbox for each of thousands of
traces would cost more than training on them. A test holds the answers equal to a sandbox's.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.learning.repositories import Task
from services.rollout.agent import Agent
from services.rollout.generation import Generation
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Change, Segment, Submission
from shared.environments import Brief, Call, Limits, Message, Result
from shared.environments.repository import SYSTEM
from shared.environments.tools import Toolbox, ToolError, load
from shared.renderers.formats.chatml import END, ChatML
from shared.sandbox.contract import WORKSPACE


@dataclass(slots=True)
class MemoryFiles:
    """Implements shared.environments.tools.FileAccess. `files`: by path, relative to the workspace."""

    files: dict[str, str]

    async def read(self, path: str, cap: int) -> tuple[bytes, bool]:
        return self._file(path).encode("utf-8", "surrogateescape"), True

    async def write(self, path: str, data: bytes) -> bool:
        name = path.removeprefix(f"{WORKSPACE}/")
        existed = name in self.files
        self.files[name] = data.decode("utf-8", "surrogateescape")
        return existed

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do != "grep":
            raise ToolError(f"{do}: not offered here")
        return self._grep(**arguments)

    async def close(self) -> None:
        return None

    def _file(self, path: str) -> str:
        name = path.removeprefix(f"{WORKSPACE}/")
        if name in self.files:
            return self.files[name]
        is_folder = path == WORKSPACE or any(known.startswith(f"{name}/") for known in self.files)
        raise ToolError(f"{'Is a directory' if is_folder else 'No such file or directory'}: {path}")

    def _grep(self, pattern: str, path: str, glob: str, ignore_case: bool, most: int) -> dict[str, Any]:
        try:
            wanted = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
        except re.error as error:
            raise ToolError(f"the pattern is no regular expression: {error}") from None
        below = path.removeprefix(WORKSPACE).strip("/.")
        names = [n for n in sorted(self.files) if not below or n == below or n.startswith(f"{below}/")]
        if not names:
            raise ToolError(f"{path} does not exist")
        if glob:
            suffix = glob.lstrip("*")
            names = [name for name in names if name.endswith(suffix)]
        found = [
            [f"{WORKSPACE}/{name}", number, line]
            for name in names
            for number, line in enumerate(self.files[name].splitlines(), 1)
            if wanted.search(line)
        ]
        return {"matches": found[:most], "more": max(0, len(found) - most)}


class _NoShell:
    async def run(self, command: str, time_s: float) -> Any:
        raise ToolError("shell: not offered here")

    async def close(self) -> None:
        return None


class MemoryWorkspace:
    """Implements shared.environments.Workspace for a generated problem, without a sandbox. Its tools run no code."""

    def __init__(self, task: Task) -> None:
        own = task.problem.limits
        self.limits = Limits(turns=own.turns, tokens=own.tokens, turn_tokens=own.turn_tokens)
        self.notes: dict[str, str] = {}
        self._given, self._files = task.files, MemoryFiles(dict(task.files))
        self._box = Toolbox(self._files, _NoShell(), WORKSPACE, command_s=1.0)
        self._brief = brief_of(task)
        self._ended = False

    def brief(self, *, continues: bool = False) -> Brief:
        return self._brief

    async def call(self, calls: Sequence[Call]) -> list[Result]:
        return [await self._one(call) for call in calls]

    async def final(self, text: str) -> Result | None:
        return None

    async def submission(self) -> Submission:
        files = self._files.files
        return Submission(changes={n: Change(text=t) for n, t in files.items() if self._given.get(n) != t})

    async def close(self) -> None:
        return None

    async def _one(self, call: Call) -> Result:
        if self._ended:
            return Result(call.id, call.name, "not run: the attempt ended before it", ran=False)
        if call.error:
            return Result(call.id, call.name, call.error, ok=False)
        try:
            answer = await load(call.name).run(self._box, call.arguments)
        except ToolError as error:
            answer = Result(text=str(error), ok=False)
        result = Result(text=answer) if isinstance(answer, str) else answer
        self._ended = self._ended or result.ends is not None
        return replace(result, call=call.id, tool=call.name)


def brief_of(task: Task) -> Brief:
    """Return what the environment tells the agent (a test holds the two equal)."""
    messages = (Message("system", SYSTEM.format(folder=WORKSPACE)), Message("user", task.problem.prompt))
    return Brief(messages, tuple(load(name).spec for name in task.problem.tools))


def turns(task: Task) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The solver's calls, one a turn: search where the issue names no module, read, edit, submit."""
    if not task.named:
        yield "grep", {"pattern": f"def {task.function}"}
    yield "read", {"path": task.path}
    yield "edit", {"path": task.path, "old": task.old, "new": task.new}
    yield "submit", {}


def written(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model writes it (Hermes)."""
    body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


@dataclass(slots=True)
class ScriptedModel:
    """Says fixed texts, one for each generation. Implements services.rollout.agent.Model."""

    renderer: ChatML
    texts: Iterator[str]
    logprob: float = 0.0  # recorded for every token
    said: list[str] = field(default_factory=list)

    @property
    def partial(self) -> Generation | None:
        return None

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        text = next(self.texts)
        self.said.append(text)
        ids = self.renderer.vocabulary.ids(text + END)
        n = len(ids)
        return Generation(ids, np.full(n, self.logprob, np.float32), np.zeros(n, np.int32), 0)


def trace(task: Task, renderer: ChatML) -> Segment:
    """Return the recorded trace of the solver. Raises ValueError where it is more than one segment or does not submit."""
    return asyncio.run(_trace(task, renderer))


async def _trace(task: Task, renderer: ChatML) -> Segment:
    workspace = MemoryWorkspace(task)
    model = ScriptedModel(renderer, (written(*call) for call in turns(task)))
    agent = Agent(renderer, model, workspace, Sampling())
    stop = await agent.run()
    work = await workspace.submission()
    segments = agent.recorder.segments()
    if len(segments) != 1 or work.changes != task.hidden.solution:
        raise ValueError(
            f"{task.problem.id}: {len(segments)} segments, stopped by {stop.value}, changed {list(work.changes)}"
        )
    return segments[0]
