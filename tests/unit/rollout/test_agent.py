"""The agent against a policy that says what the test wrote, in the compact format."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from services.rollout.agent import Agent
from services.rollout.generation import Generation
from shared.contracts.messages import StopReason
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import Brief, InfrastructureError
from shared.environments.function.actions import Observation, Tool
from shared.environments.function.workspace import MAX_BROKEN, FunctionWorkspace
from shared.problems import Case, FunctionProblem
from shared.renderers import Exchange
from shared.renderers.formats.compact_1 import Compact, FormatTooLong
from shared.renderers.template import Refused

PROBLEM = FunctionProblem(
    id="p",
    files={"f.py": "def f(a):\n    return a - 1\n"},
    entry="f",
    visible=[Case(args="[1]", expected="2")],
    actual=["0"],
)
FIXED = "def f(a):\n    return a + 1\n"


class Script:
    """Says one completion after the other; checks that it is sent exactly what was said before."""

    def __init__(self, *completions: list[int] | Callable[[], list[int]]) -> None:
        self.completions = list(completions)
        self.contexts: list[list[int]] = []

    @property
    def partial(self) -> Generation | None:
        return None

    async def generate(self, tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
        self.contexts.append(tokens)
        await asyncio.sleep(0)
        completion = self.completions.pop(0)
        if callable(completion):
            completion = completion()
        cut = completion[:max_new_tokens]
        n = len(cut)
        return Generation(
            tokens=cut,
            logprobs_N=np.full(n, -0.5, dtype=np.float32),
            versions_N=np.full(n, 3, dtype=np.int32),
            oldest_kv_version=3,
            finish="stop" if n == len(completion) else "length",
        )


class VisibleTests:
    """Passes exactly for the fixed file."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self, problem: FunctionProblem, files: dict[str, str]) -> Observation:
        self.runs += 1
        return Observation(Tool.test) if files == {"f.py": FIXED} else Observation(Tool.test, failing=0, got="0")


def agent(
    compact: Compact,
    *completions: list[int] | Callable[[], list[int]],
    tests: VisibleTests | None = None,
    problem: FunctionProblem = PROBLEM,
    **sampling: int | str,
) -> Agent:
    """One that goes on reading after a failure, unless `sampling` says otherwise."""
    limits = Sampling(**{"retry": "append"} | sampling)  # type: ignore[arg-type]
    workspace = FunctionWorkspace(problem, limits, tests or VisibleTests())
    return Agent(compact, Script(*completions), workspace, limits)


def submitted(made: Agent) -> Submission:
    return asyncio.run(made.workspace.submission())


def visible_tests(made: Agent) -> VisibleTests:
    return made.workspace._tests


def run(made: Agent) -> StopReason:
    return asyncio.run(made.run())


def edit(compact: Compact, line: int = 1, old: str = "-", new: str = "+") -> list[int]:
    return [
        compact.edit,
        compact.line_token(line),
        *compact.encode(old),
        compact.got,
        *compact.encode(new),
        compact.end,
    ]


def test_a_repair_is_recorded_token_for_token(compact: Compact) -> None:
    first = [*edit(compact, new="*"), compact.test]
    second = [compact.undo, *edit(compact), compact.test]
    made = agent(compact, first, second, [compact.submit])
    assert run(made) is StopReason.submitted
    assert submitted(made).files == {"f.py": FIXED}
    assert submitted(made).first_edit_files == {"f.py": FIXED.replace("+", "*")}
    prompt = compact.prompt(PROBLEM, PROBLEM.files)
    fails = compact.observation(Observation(Tool.test, failing=0, got="0"))
    passes = compact.observation(Observation(Tool.test))
    (segment,) = made.recorder.segments()
    parts = [(prompt, 0), (first, 1), (fails, 0), (second, 1), (passes, 0), ([compact.submit], 1)]
    assert segment.tokens.tolist() == [t for tokens, _ in parts for t in tokens]
    assert segment.loss_mask.tolist() == [bool(m) for tokens, m in parts for _ in tokens]
    assert [(s.role, s.tool, s.turn) for s in segment.spans] == [
        ("prompt", "", 0),
        ("tool_call", "edit", 1),
        ("tool_call", "test", 1),
        ("tool_output", "test", 1),
        ("tool_call", "undo", 2),
        ("tool_call", "edit", 2),
        ("tool_call", "test", 2),
        ("tool_output", "test", 2),
        ("final", "submit", 3),
    ]
    assert all(span.ok for span in segment.spans)
    effort = made.effort
    assert (effort.turns, effort.edits, effort.tests, effort.tool_calls, effort.broken_tool_calls) == (3, 2, 2, 6, 0)
    assert effort.final_tokens == 1
    assert effort.sampled_tokens == sum(segment.loss_mask)
    assert effort.tool_output_tokens == len(fails) + len(passes)
    assert effort.prompt_tokens == len(prompt)


def test_every_request_holds_exactly_what_was_recorded(compact: Compact) -> None:
    made = agent(compact, [compact.test], [*edit(compact), compact.test], [compact.submit])
    run(made)
    (segment,) = made.recorder.segments()
    script = made.model
    assert isinstance(script, Script)
    for context in script.contexts:
        assert segment.tokens.tolist()[: len(context)] == context


def test_calls_after_one_that_failed_do_nothing(compact: Compact) -> None:
    """`submit` was written believing that the edit would work."""
    made = agent(compact, [*edit(compact, old="nowhere"), compact.submit], [*edit(compact), compact.submit])
    assert run(made) is StopReason.submitted
    assert submitted(made).files == {"f.py": FIXED}
    assert made.effort.broken_tool_calls == 1
    assert [s.ok for s in made.recorder.segments()[0].spans if s.role in ("tool_call", "final")] == [
        False,
        False,
        True,
        True,
    ]


def test_what_is_submitted_at_a_cap_is_the_work_as_it_is(compact: Compact) -> None:
    turns = agent(compact, [*edit(compact), compact.test], [compact.test], max_turns=2)
    assert run(turns) is StopReason.turn_limit
    edits = agent(compact, [*edit(compact), *edit(compact, old="a", new="b"), compact.submit], max_edits=1)
    assert run(edits) is StopReason.turn_limit
    budget = agent(compact, [*edit(compact), compact.test, *[7] * 99], max_completion_tokens=len(edit(compact)) + 1)
    assert run(budget) is StopReason.context_full
    assert budget.recorder.segments()[0].spans[-1].fault == "endless"
    for made in (turns, edits, budget):
        assert submitted(made).files == {"f.py": FIXED}
        assert made.recorder.segments()


def test_what_has_failed_before_is_answered_from_memory_and_uses_up_nothing_but_tokens(compact: Compact) -> None:
    wrong, undo = [*edit(compact, new="*"), compact.test], compact.undo
    script = [wrong, [undo, *wrong], [undo, *wrong], [undo, *edit(compact), compact.test], [compact.submit]]
    made = agent(compact, *script, max_turns=3, max_edits=2)
    assert run(made) is StopReason.submitted
    assert submitted(made).files == {"f.py": FIXED}
    assert (made.effort.turns, made.effort.edits, made.effort.tests) == (5, 4, 4)
    assert visible_tests(made).runs == 2
    answers = [span for span in made.recorder.segments()[0].spans if span.role == "tool_output"]
    tokens = made.recorder.segments()[0].tokens
    first, again, third, passed = (tokens[s.start : s.end].tolist() for s in answers)
    assert first == again == third != passed


def test_a_policy_that_only_repeats_itself_comes_to_an_end(compact: Compact) -> None:
    made = agent(compact, *[[compact.test]] * 99, max_turns=4, max_repeats=3, max_completion_tokens=10_000)
    assert run(made) is StopReason.turn_limit
    assert made.effort.turns == 4 + 3


def test_the_budget_counts_observations(compact: Compact) -> None:
    answer = len(compact.observation(Observation(Tool.test, failing=0, got="0")))
    made = agent(compact, [compact.test], [compact.test], max_completion_tokens=1 + answer)
    assert run(made) is StopReason.context_full
    assert made.effort.turns == 1


def test_a_policy_that_only_breaks_calls_is_stopped(compact: Compact) -> None:
    made = agent(compact, *([[compact.end, compact.test]] * 9), max_turns=9)
    assert run(made) is StopReason.format_errors
    assert made.effort.broken_tool_calls == MAX_BROKEN + 1


def test_a_fresh_retry_reads_the_task_alone(compact: Compact) -> None:
    wrong = [*edit(compact, new="*"), compact.test]
    broken = [*edit(compact, old="nowhere"), compact.test]
    made = agent(compact, wrong, broken, [*edit(compact), compact.test], [compact.submit], retry="fresh")
    assert run(made) is StopReason.submitted
    assert submitted(made).files == {"f.py": FIXED}
    assert submitted(made).first_edit_files == {"f.py": FIXED.replace("+", "*")}
    task = compact.prompt(PROBLEM, PROBLEM.files)
    assert made.model.contexts[:3] == [task] * 3  # type: ignore[attr-defined]
    segments = made.recorder.segments()
    passed = compact.observation(Observation(Tool.test))
    repaired = [*edit(compact), compact.test, *passed, compact.submit]
    assert [s.tokens.tolist() for s in segments] == [[*task, *wrong], [*task, *broken], [*task, *repaired]]
    assert [s.spans[1].turn for s in segments] == [1, 2, 3]
    assert [s.spans[1].ok for s in segments] == [True, False, True]
    assert (made.effort.edits, made.effort.tests, made.effort.broken_tool_calls) == (2, 2, 1)
    assert made.effort.prompt_tokens == 3 * len(task)
    assert made.effort.tool_output_tokens == len(passed)


def test_a_fresh_retry_cannot_know_what_it_repeats_and_pays_tokens_alone(compact: Compact) -> None:
    wrong = [*edit(compact, new="*"), compact.test]
    given = [compact.test]
    script = [wrong, wrong, wrong, given, given, [*edit(compact), compact.test], [compact.submit]]
    made = agent(compact, *script, retry="fresh", max_edits=2, max_turns=3)
    assert run(made) is StopReason.submitted
    assert visible_tests(made).runs == 3  # the wrong edit, the given files, the right one
    assert [s.spans[-1].fault for s in made.recorder.segments()] == ["", "", "", "repeated", "repeated", ""]
    unread = agent(compact, wrong, [*edit(compact, new="*"), compact.submit], retry="fresh")
    assert run(unread) is StopReason.submitted
    assert unread.recorder.segments()[-1].spans[-1].fault == ""
    stuck = agent(compact, *[wrong] * 99, retry="fresh", max_edits=2, max_repeats=5, max_completion_tokens=10_000)
    assert run(stuck) is StopReason.turn_limit
    assert (stuck.effort.edits, stuck.effort.turns) == (2 + 5, 2 + 5 + 1)  # the last turn's edit was one too many
    assert stuck.workspace.files == PROBLEM.files


def test_work_that_passed_or_is_noted_down_is_not_forgotten(compact: Compact) -> None:
    right, broken = [*edit(compact), compact.test], [*edit(compact, old="nowhere"), compact.test]
    passed = agent(compact, right, broken, [compact.submit], retry="fresh")
    assert run(passed) is StopReason.submitted
    assert passed.workspace.files == {"f.py": FIXED}
    assert len(passed.recorder.segments()) == 1
    wrong, note = [*edit(compact, old="/", new="*"), compact.test], [compact.line_token(1), compact.done]
    script = [edit(compact, new="/"), note, wrong, note, [compact.undo, compact.submit]]
    noted = agent(compact, *script, retry="fresh", summary_trigger_tokens=1)
    assert run(noted) is StopReason.submitted
    assert all("summary" in [s.role for s in segment.spans] for segment in noted.recorder.segments())
    assert noted.workspace.files == {"f.py": FIXED.replace("+", "/")}


def test_a_self_summary_starts_a_new_segment_that_holds_it_as_it_was_sampled(compact: Compact) -> None:
    summary = [compact.line_token(1), *compact.encode("-"), compact.got, *compact.encode("+"), compact.end]
    made = agent(
        compact,
        [*edit(compact), compact.test],
        [*summary, compact.done],
        [compact.submit],
        summary_trigger_tokens=1,
    )
    assert run(made) is StopReason.submitted
    first, second = made.recorder.segments()
    assert first.tokens[-len(summary) - 2] == compact.sum
    assert first.loss_mask[-len(summary) - 2 :].tolist() == [False] + [True] * (len(summary) + 1)
    assert second.tokens.tolist() == [*compact.prompt(PROBLEM, {"f.py": FIXED}, tuple(summary)), compact.submit]
    assert second.loss_mask.sum() == 1
    assert [s.role for s in second.spans] == ["prompt", "summary", "prompt", "final"]
    assert made.effort.summaries == 1


class Failing(Compact):
    """A renderer that cannot write a summary."""

    def __init__(self, whole: Compact, error: ValueError) -> None:
        self.__dict__.update(whole.__dict__)
        self._error = error

    def opening(self, brief: Brief, summary: Sequence[int] = (), history: Sequence[Exchange] = ()) -> list[int]:
        if summary:
            raise self._error
        return super().opening(brief, summary, history)


def test_only_an_opening_that_is_too_long_is_the_agents_fault(compact: Compact) -> None:
    summary = [*compact.encode("-"), compact.done]
    for error in (Refused("the template refuses"), ValueError("a defect")):
        made = agent(Failing(compact, error), [*edit(compact), compact.test], summary, summary_trigger_tokens=1)
        with pytest.raises(InfrastructureError, match=str(error)):
            run(made)
    with pytest.raises(FormatTooLong) as long:
        compact.prompt(PROBLEM, PROBLEM.files, tuple(summary) * 300)
    made = agent(Failing(compact, long.value), [*edit(compact), compact.test], summary, summary_trigger_tokens=1)
    assert run(made) is StopReason.context_full


def test_a_deadline_submits_the_work_and_keeps_what_was_sampled(compact: Compact) -> None:
    async def scenario() -> tuple[StopReason, Agent]:
        made = agent(compact, [*edit(compact), compact.test])
        gate = asyncio.Event()
        script = made.model.generate

        async def stuck(tokens: list[int], *, max_new_tokens: int, first_row: int) -> Generation:
            if len(made.recorder.segments()) == 0:
                return await script(tokens, max_new_tokens=max_new_tokens, first_row=first_row)
            gate.set()
            await asyncio.Event().wait()
            raise AssertionError

        made.model.generate = stuck  # type: ignore[method-assign]
        task = asyncio.create_task(made.run())
        await gate.wait()
        made.deadline = True
        task.cancel()
        return await task, made

    stop, made = asyncio.run(scenario())
    assert stop is StopReason.deadline
    assert submitted(made).files == {"f.py": FIXED}
    assert made.recorder.segments()[0].loss_mask.sum() == len(edit(compact)) + 1


def test_a_problem_that_the_format_cannot_write_is_no_outcome(compact: Compact) -> None:
    long = FunctionProblem(id="p", files={"f.py": "x = 1\n" * 99}, entry="f", visible=[])
    made = agent(compact, problem=long)
    with pytest.raises(InfrastructureError, match="99 lines"):
        run(made)


def faults(made: Agent) -> dict[int, set[str]]:
    (segment,) = made.recorder.segments()
    found: dict[int, set[str]] = {}
    for span in segment.spans:
        if segment.loss_mask[span.start]:
            found.setdefault(span.turn, set()).add(span.fault)
    return found


def test_testing_what_failed_and_submitting_it_are_faults_of_their_turns(compact: Compact) -> None:
    wrong = [*edit(compact, new="*"), compact.test]
    made = agent(compact, [compact.test], wrong, [compact.undo, *wrong], [compact.submit])
    run(made)
    # the given files are known to fail; the same wrong edit again is the same state again
    assert faults(made) == {1: {"repeated"}, 2: {""}, 3: {"repeated"}, 4: {"gave_up"}}


def test_what_passed_or_was_not_tested_is_no_fault_to_submit(compact: Compact) -> None:
    passing = agent(compact, [*edit(compact), compact.test], [compact.submit])
    run(passing)
    assert faults(passing) == {1: {""}, 2: {""}}
    untested = agent(compact, [*edit(compact, new="*"), compact.submit])
    run(untested)
    assert faults(untested) == {1: {""}}


def test_a_failure_that_load_may_have_caused_is_not_held_against_the_policy(compact: Compact) -> None:
    class Busy(VisibleTests):
        async def run(self, problem: FunctionProblem, files: dict[str, str]) -> Observation:
            observation = await super().run(problem, files)
            return Observation(Tool.test, failing=0, got="Timeout") if self.runs == 1 else observation

    right = [*edit(compact), compact.test]
    made = agent(compact, right, [compact.test], [compact.submit], tests=Busy())
    assert run(made) is StopReason.submitted
    assert faults(made) == {1: {""}, 2: {""}, 3: {""}}
