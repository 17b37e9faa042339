"""The agent: ask the model, execute what it asked for, append what came back; until an end.

The loop knows its problem as a Workspace and its chat format as a Renderer; it knows no tool, no kind of problem and no
template by name, and records token ids, never text. Ends are typed exceptions, turned into a StopReason in one place
(`Agent.run`).

Invariants:
- Every sampled token that came back is recorded, whatever ends the attempt; of a generation that a deadline cuts off, what the
  engine has said of it.
- Between two turns, `state`, the recorder and the workspace are all there is: another worker can continue from them (`resume`).
- New context is only appended. If the template would rewrite earlier tokens, or the workspace restarts, the agent opens a new
  segment.
- At a limit the work is submitted as it is. Every end but an InfrastructureError is scored.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from services.rollout.ends import ENDS, ContextFull, Deadline, End, FormatErrors, TurnLimit
from services.rollout.generation import Generation
from services.rollout.recorder import Part, Recorder
from shared.contracts.messages import Effort, StopReason
from shared.contracts.run import Sampling
from shared.environments import Brief, Call, InfrastructureError, Result, Workspace
from shared.environments.answering import require_one_each
from shared.environments.calling import checked
from shared.renderers import Exchange, Reading, Renderer, Tail, TooLong

SUMMARY = "summary"  # the tool of spans that ask for a self-summary, and of the summary
ASK_FOR_SUMMARY = (
    "Your context is nearly full. Summarise for yourself what the task is, what you found out and changed, and what is left "
    "to do. Only this summary and the task will remain."
)

CUT_OFF = "cut"  # the fault of a turn that a deadline ended while it was sampled
CUT = "Your message was cut off after {} tokens. Say less, and call a tool or finish."


class Model(Protocol):
    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        """Sample until a stop token or `max_new_tokens`. Raises InfrastructureError only where waiting cannot help."""

    @property
    def partial(self) -> Generation | None:
        """Return what is sampled of a generation that was cancelled; None: nothing."""


class State(msgspec.Struct, frozen=True):
    """All that an agent knows between two turns beside its recorder and its workspace. `spent`: fields of Effort."""

    spent: dict[str, int]
    free_turns: int
    broken_in_a_row: int
    context_tokens: int
    asked_for_summary: bool


async def _nothing() -> None:
    return None


@dataclass(slots=True)
class Agent:
    renderer: Renderer
    model: Model
    workspace: Workspace
    sampling: Sampling
    recorder: Recorder = field(default_factory=Recorder)
    spent: Counter[str] = field(default_factory=Counter)  # fields of Effort
    free_turns: int = 0  # turns that do not count against the limit
    broken_in_a_row: int = 0  # turns without a call that could be read
    context_tokens: int = 0  # sampled and observed, over all segments
    brief: Brief = field(default_factory=lambda: Brief((), ()))  # of the open segment
    asked_for_summary: bool = False  # the next turn is a self-summary
    deadline: bool = False  # set before the task is cancelled: submit the work as it is
    turned: Callable[[], Awaitable[None]] = _nothing  # called between two turns
    resumed: bool = False  # a segment is open
    sampling_now: bool = False  # a generation is being waited for: a cancel leaves `state` as it was before the turn
    clock: asyncio.Timeout | None = None

    @property
    def effort(self) -> Effort:
        return Effort(**self.spent)

    @property
    def state(self) -> State:
        """Return the state between two turns. While a turn is being sampled it is that before the turn."""
        return State(
            dict(self.spent), self.free_turns, self.broken_in_a_row, self.context_tokens, self.asked_for_summary
        )

    def resume(self, state: State, recorder: Recorder, brief: Brief) -> None:
        """Take over from another worker. `brief`: that of the open segment."""
        self.spent, self.recorder, self.brief, self.resumed = Counter(state.spent), recorder, brief, True
        self.free_turns, self.broken_in_a_row = state.free_turns, state.broken_in_a_row
        self.context_tokens, self.asked_for_summary = state.context_tokens, state.asked_for_summary

    async def run(self, spent_s: float = 0.0) -> StopReason:
        """Return why the attempt ended. `spent_s`: seconds of its limit that are used up already. Raises InfrastructureError, and
        CancelledError unless `deadline` was set before."""
        try:
            limit_s = self.workspace.limits.seconds
            async with asyncio.timeout(max(0.0, limit_s - spent_s) if limit_s else None) as self.clock:
                if not self.resumed:
                    self.begin()
                while True:
                    await self.step()
                    await self.turned()
        except End as end:
            return end.stop
        except TimeoutError as error:
            if self.clock is None or not self.clock.expired():
                raise InfrastructureError(f"found a time-out that is not the attempt's: {error}") from None
            return Deadline.stop
        except asyncio.CancelledError:
            if not self.deadline:
                raise
            asyncio.current_task().uncancel()  # type: ignore[union-attr]  # a coroutine always runs in a task
            return Deadline.stop

    def begin(self, summary: Sequence[int] = (), *, history: Sequence[Exchange] = ()) -> None:
        """Open a segment: the task as it stands, with what the agent noted down before, or with the turns so far."""
        self.brief = self.workspace.brief(continues=bool(summary or history))
        try:
            opening = self.renderer.opening(self.brief, summary, history)
        except ValueError as error:
            if isinstance(error, TooLong) and (summary or history):
                raise ContextFull from None
            raise InfrastructureError(f"format {self.renderer.name}: {error}") from None
        self.recorder.begin(opening, summary, keep=bool(history))
        self.spent["prompt_tokens"] += len(opening)

    async def step(self) -> None:
        """Take one turn: a generation, its calls, their answer; or the self-summary that was asked for."""
        if self.asked_for_summary:
            return await self.summarise()
        context = self.recorder.context
        generation = await self.ask(context)
        reading = self.renderer.reading(generation.tokens, context, self.brief.tools)
        results = await self.act(generation, reading)
        self.end_if_over(generation, reading, results)
        if any(result.restart for result in results):
            return self.begin()
        await self.answer(Tail(context, generation.tokens, self.brief), results)

    async def ask(self, context: list[int]) -> Generation:
        """Count one turn, a self-summary included, and sample once within the remaining limits. What a cancel leaves of a
        generation is recorded if the attempt is to be submitted; its calls are not executed."""
        limits = self.workspace.limits
        if self.spent["turns"] - self.free_turns >= limits.turns:
            raise TurnLimit
        room = min(limits.tokens - self.context_tokens, self.renderer.context - len(context))
        if room < 1:
            raise ContextFull
        most = min(room, limits.turn_tokens or room)
        self.sampling_now = True
        try:
            generation = await self.model.generate(context, max_new_tokens=most, first_row=self.recorder.rows)
        except asyncio.CancelledError:
            submitting = self.deadline or (self.clock is not None and self.clock.expired())
            if submitting and (cut := self.model.partial) is not None:
                self.count_turn(cut)
                self.recorder.sampled(cut, [], self.spent["turns"], fault=CUT_OFF)
                self.spent["thinking_tokens"] += len(cut.tokens)
            raise
        finally:
            self.sampling_now = False
        self.count_turn(generation)
        return generation

    def count_turn(self, generation: Generation) -> None:
        self.spent["turns"] += 1
        self.context_tokens += len(generation.tokens)

    async def act(self, generation: Generation, reading: Reading) -> list[Result]:
        """Execute the calls, or take the final message; record the generation whatever becomes of them."""
        calls = checked(reading.calls, self.brief.tools)
        results: list[Result] = []
        try:
            results = await self.workspace.call(calls) if calls else [await self.final(generation, reading)]
            require_one_each(calls or [None], results, f"results of {type(self.workspace).__name__}.call")
        finally:
            self.record(generation, reading, calls, results)
        return results

    async def final(self, generation: Generation, reading: Reading) -> Result:
        """Take a message without a call: it ends the attempt, unless the workspace answers it or it was cut short."""
        if generation.finish == "length":
            return Result(ok=False, text=CUT.format(len(generation.tokens)))
        result = await self.workspace.final(reading.text)
        return Result(ends=StopReason.submitted) if result is None else result

    def record(
        self, generation: Generation, reading: Reading, calls: Sequence[Call], results: Sequence[Result]
    ) -> None:
        """Append the generation to the segment and count it. A call cancelled before it had a result is recorded as run and ok."""
        fault = next((result.fault for result in reversed(results) if result.fault), "")
        if not fault and generation.finish == "length":
            fault = "endless"
        parts = [] if reading.final is None or calls else [Part(*reading.final, "final")]
        for number, call in enumerate(calls):
            result = results[number] if number < len(results) else Result()
            parts.append(Part(call.start, call.end, self.role(call), call.name, result.ok))
            if result.ran:
                self.count(call, result)
        self.recorder.sampled(generation, parts, self.spent["turns"], fault=fault)
        self.spent["thinking_tokens"] += len(generation.tokens)
        for part in parts:
            self.spent["thinking_tokens"] -= part.end - part.start
            self.spent["final_tokens" if part.role == "final" else "tool_call_tokens"] += part.end - part.start

    def role(self, call: Call) -> str:
        """A call that ends the attempt is the final message."""
        return "final" if self.effect(call) == "ends" else "tool_call"

    def effect(self, call: Call) -> str:
        """Return the effect of the tool, or the empty string where no such tool was offered."""
        spec = self.brief.tool(call.name)
        return spec.effect if spec is not None else ""

    def count(self, call: Call, result: Result) -> None:
        self.spent["tool_calls"] += 1
        self.free_turns += result.free
        if result.ok and result.ends is None:
            self.spent["edits"] += self.effect(call) == "changes"
            self.spent["tests"] += self.effect(call) == "tests"

    def end_if_over(self, generation: Generation, reading: Reading, results: Sequence[Result]) -> None:
        """Raise the exception (an `End`) for which the attempt is over after this turn; return if it goes on. Counts
        the turn's broken calls, too, but not those of a generation that the end of the context cut off."""
        limits = self.workspace.limits
        cut = generation.finish == "length" and len(generation.tokens) != limits.turn_tokens
        if not cut:
            self.spent["broken_tool_calls"] += sum(result.ran and not result.ok for result in results)
        if ends := next((result.ends for result in results if result.ends is not None), None):
            raise ENDS[ends]
        if cut:
            raise ContextFull
        readable = any(call.error is None for call in reading.calls) or reading.final is not None
        self.broken_in_a_row = 0 if readable else self.broken_in_a_row + 1
        if 0 < limits.broken_total < self.spent["broken_tool_calls"]:
            raise FormatErrors
        if 0 < limits.broken_in_a_row <= self.broken_in_a_row:
            raise FormatErrors

    async def answer(self, tail: Tail, results: Sequence[Result]) -> None:
        """Append the results, and the request for a self-summary where the segment has become long. Where the template would
        rewrite what was said, open a segment that holds all turns."""
        self.recorder.answered(results)
        answers = self.renderer.answers(tail, results)
        if answers is None:
            return self.begin(history=tuple(self.recorder.history))
        long = 0 < self.sampling.summary_trigger_tokens < self.recorder.length + len(answers)
        asking = self.renderer.asking(tail, results, ASK_FOR_SUMMARY) if long else None
        answer = answers if asking is None else asking[: _common(answers, asking)]
        ran = [result for result in results if result.ran]
        last = next((result for result in ran if not result.ok), ran[-1])
        self.observe(answer, tool=last.tool, ok=last.ok, passed=bool(last.passed))
        self.spent["tool_output_tokens"] += len(answer)
        if asking is not None:
            self.observe(asking[len(answer) :], role="prompt", tool=SUMMARY)
            self.asked_for_summary = True

    async def summarise(self) -> None:
        """Take the self-summary that was asked for, and go on in a new segment that holds it, id for id, as context."""
        generation = await self.ask(self.recorder.context)
        self.asked_for_summary = False
        tokens = generation.tokens
        fault = "endless" if generation.finish == "length" else ""
        self.recorder.sampled(generation, [Part(0, len(tokens), "summary", SUMMARY)], self.spent["turns"], fault=fault)
        self.spent["thinking_tokens"] += len(tokens)
        self.spent["summaries"] += 1
        if generation.finish == "length":
            raise ContextFull
        self.begin(self.renderer.kept(tokens))

    def observe(
        self, tokens: list[int], *, role: str = "tool_output", tool: str, ok: bool = True, passed: bool = False
    ) -> None:
        self.recorder.observed(tokens, self.spent["turns"], role, tool, ok, passed)
        self.context_tokens += len(tokens)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many ids the two begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
