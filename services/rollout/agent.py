"""The agent: ask the model, execute what it asked for, append what came back; until an end.

Ends are typed exceptions, turned into a StopReason in one place (`Agent.run`). The loop knows the chat format only as
shared.formats.Format and sees text only where a tool needs it; what is recorded are token ids.

Invariants:
- Calls of one generation run in order, up to the first that fails: what follows it was written believing that it worked.
- The last call that ran is answered by one observation, unless the attempt ends with it. Where a retry is fresh, an answer
  of failure ends the segment instead, unread: the next one is the task alone, with the files as they were given. Not so
  after a test that passed, or where a self-summary is being read: those are work that is kept.
- A test of files that have failed before uses up no turn and no edit, `max_repeats` times at most: the caps are on what is
  tried. Its tokens count. It is answered from memory, but for the given files' first one.
- At a cap the work is submitted as it is, and scored. Only an InfrastructureError is no outcome.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from services.rollout.ends import ContextFull, End, FormatErrors, InfrastructureError, Submitted, TurnLimit
from services.rollout.generation import Generation
from services.rollout.recorder import Part, Recorder
from services.rollout.visible_tests import LOAD_ERRORS
from shared.contracts.messages import Effort, StopReason
from shared.contracts.run import Sampling
from shared.formats import Action, Format, Observation, Tool
from shared.formats.edits import EditError, Workspace
from shared.problems import Problem

MAX_BROKEN = 3  # calls that cannot be read or executed; a policy that breaks more is not going to recover


class Model(Protocol):
    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        """Samples until a stop token or `max_new_tokens`. Raises InfrastructureError only where waiting cannot help."""


class Tests(Protocol):
    async def run(self, problem: Problem, files: dict[str, str]) -> Observation:
        """The visible tests on `files`. Raises InfrastructureError."""


@dataclass(slots=True)
class Agent:
    problem: Problem
    format: Format
    model: Model
    tests: Tests
    sampling: Sampling
    recorder: Recorder = field(default_factory=Recorder)
    workspace: Workspace = field(init=False)
    first_edit: dict[str, str] | None = None  # the files after the first edit alone
    spent: Counter[str] = field(default_factory=Counter)  # fields of Effort
    # Hash of files that failed -> what the test said; None: the task says that the given ones do.
    failed: dict[int, Observation | None] = field(default_factory=dict)
    untested: int = 0  # edits since the last test
    forgiven: Counter[str] = field(default_factory=Counter)  # turns and edits that only came back to what had failed
    fault: str = ""  # of the present turn (shared.contracts.trajectory.Span)
    context_tokens: int = 0  # sampled and observed, over all segments
    may_forget: bool = False  # a failure opens a fresh segment
    deadline: bool = False  # set before the task is cancelled: submit the work as it is

    def __post_init__(self) -> None:
        self.workspace = Workspace(dict(self.problem.files))
        self.failed[_state(self.problem.files)] = None

    @property
    def effort(self) -> Effort:
        return Effort(**self.spent)

    async def run(self) -> StopReason:
        """Why the attempt ended. Raises InfrastructureError, and CancelledError unless `deadline` was set before."""
        try:
            self.begin()
            while True:
                await self.step()
        except End as end:
            return end.stop
        except asyncio.CancelledError:
            if not self.deadline:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # a coroutine always runs in a task
            return StopReason.deadline

    def begin(self, summary: tuple[int, ...] = ()) -> None:
        """Opens a segment: the task with the present state of the files, and what the agent noted down before."""
        try:
            prompt = self.format.prompt(self.problem, self.workspace.files, summary)
        except ValueError as error:
            if summary:
                raise ContextFull from None
            raise InfrastructureError(f"format {self.format.name}: {error}") from None
        self.recorder.begin(prompt, summary)
        self.may_forget = self.sampling.retry == "fresh" and not summary
        self.spent["prompt_tokens"] += len(prompt)

    async def step(self) -> None:
        """One turn: a generation, its calls, one observation."""
        generation = await self.ask()
        actions = self.format.actions(generation.tokens)
        observation, worked = Observation(Tool.submit, error="" if actions else "no call"), 0
        try:
            for action in actions:
                observation = await self.execute(action)
                if observation.error:
                    break
                worked += 1
        finally:  # whatever ends the attempt, these tokens were sampled
            self.record(generation, actions, worked, broken=bool(observation.error))
        if generation.finish == "length":
            raise ContextFull
        if observation.error:
            self.spent["broken_tool_calls"] += 1
            if self.spent["broken_tool_calls"] > MAX_BROKEN:
                raise FormatErrors
        if self.may_forget and (observation.error or observation.failing is not None):
            self.workspace, self.untested = Workspace(dict(self.problem.files)), 0
            return self.begin()
        answer = self.format.observation(observation)
        passed = observation.tool is Tool.test and not observation.error and observation.failing is None
        self.may_forget &= not passed
        self.observe(answer, tool=observation.tool, ok=not observation.error, passed=passed)
        self.spent["tool_output_tokens"] += len(answer)
        if 0 < self.sampling.summary_trigger_tokens < self.recorder.length:
            await self.summarise()

    async def ask(self) -> Generation:
        """One generation within what is left of the budget: it opens a turn, without fault unless it is cut."""
        if self.spent["turns"] - self.forgiven["turns"] >= self.sampling.max_turns:
            raise TurnLimit
        left = self.sampling.max_completion_tokens - self.context_tokens
        if (room := min(left, self.format.context - self.recorder.length)) < 1:
            raise ContextFull
        self.spent["turns"] += 1
        generation = await self.model.generate(self.recorder.context, max_new_tokens=room, first_row=self.recorder.rows)
        self.context_tokens += len(generation.tokens)
        self.fault = "endless" if generation.finish == "length" else ""
        return generation

    async def execute(self, action: Action) -> Observation:
        """Runs one call. Raises Submitted, TurnLimit."""
        self.spent["tool_calls"] += 1
        if action.error:
            return Observation(action.tool, error=action.error)
        if action.tool is Tool.submit:
            if self.known_to_fail(_state(self.workspace.files)):
                self.fault = "gave_up"
            raise Submitted
        if action.tool is Tool.test:
            self.spent["tests"] += 1
            return await self.test()
        if action.tool is Tool.edit and self.spent["edits"] - self.forgiven["edits"] >= self.sampling.max_edits:
            raise TurnLimit
        try:
            if action.tool is Tool.edit:
                self.workspace = self.workspace.edit(action)
                self.spent["edits"] += 1
                self.untested += 1
                self.first_edit = self.first_edit or self.workspace.files
            elif action.tool is Tool.undo:
                self.workspace = self.workspace.undo()
            else:
                raise EditError(f"{action.tool} was not asked for")
        except EditError as error:
            return Observation(action.tool, error=str(error))
        return Observation(action.tool)

    async def test(self) -> Observation:
        state = _state(self.workspace.files)
        edits, self.untested = self.untested, 0
        if state in self.failed:
            if self.known_to_fail(state):
                self.fault = "repeated"
            if self.forgiven["turns"] < self.sampling.max_repeats:
                self.forgiven.update(turns=1, edits=edits)
        observation = self.failed.get(state) or await self.tests.run(self.problem, self.workspace.files)
        if observation.failing is not None and observation.got not in LOAD_ERRORS:
            self.failed[state] = observation
        return observation

    def known_to_fail(self, state: int) -> bool:
        """A policy that does not read what it tried cannot know that it repeats it; that the given files fail, it can."""
        return state in self.failed and (self.sampling.retry == "append" or state == _state(self.problem.files))

    async def summarise(self) -> None:
        """Asks for a self-summary and goes on in a new segment that holds it, id for id, as context."""
        self.observe(self.format.summary_request(), role="prompt", tool=Tool.summary)
        generation = await self.ask()
        tokens = generation.tokens
        parts = [Part(0, len(tokens), "summary", Tool.summary)]
        self.recorder.sampled(generation, parts, self.spent["turns"], fault=self.fault)
        self.spent["thinking_tokens"] += len(tokens)
        self.spent["summaries"] += 1
        if generation.finish == "length":
            raise ContextFull
        ends = tokens and tokens[-1] in self.format.stop_tokens
        self.begin(tuple(tokens[:-1] if ends else tokens))

    def record(self, generation: Generation, actions: list[Action], worked: int, broken: bool) -> None:
        """Appends a generation: each call is a span, the rest thinking. `submit` is the final message. Where a call is
        broken, it and the calls after the first `worked` did nothing."""
        parts = [
            Part(a.start, a.end, "final" if a.tool is Tool.submit else "tool_call", a.tool, not broken or i < worked)
            for i, a in enumerate(actions)
        ]
        self.recorder.sampled(generation, parts, self.spent["turns"], fault=self.fault)
        self.spent["thinking_tokens"] += len(generation.tokens)
        for part in parts:
            self.spent["thinking_tokens"] -= part.end - part.start
            self.spent["final_tokens" if part.role == "final" else "tool_call_tokens"] += part.end - part.start

    def observe(
        self, tokens: list[int], *, role: str = "tool_output", tool: Tool, ok: bool = True, passed: bool = False
    ) -> None:
        self.recorder.observed(tokens, self.spent["turns"], role, tool, ok, passed)
        self.context_tokens += len(tokens)


def _state(files: dict[str, str]) -> int:
    return hash(frozenset(files.items()))
