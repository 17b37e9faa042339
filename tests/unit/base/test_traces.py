import random

import pytest
from miniature import outcome

from services.trainer.base import traces
from services.trainer.base.samples import Weight
from shared.environments.function.actions import Observation, Tool
from shared.environments.function.edits import Files
from shared.problems import FunctionHidden, FunctionProblem
from shared.problems.values import decode, encode
from shared.renderers.formats.compact_1 import Compact

Pairs = list[tuple[FunctionProblem, FunctionHidden]]


def executed(plan: traces.Plan) -> list[Observation]:
    """What the sandbox would answer."""
    observations = []
    for attempt in plan.tries:
        (source,) = attempt.files.values()
        got = [outcome(source, decode(case.args)) for case in plan.problem.visible]
        wrong = [i for i, (g, c) in enumerate(zip(got, plan.problem.visible, strict=True)) if g != c.expected]
        observations.append(
            Observation(Tool.test, failing=wrong[0], got=got[wrong[0]]) if wrong else Observation(Tool.test)
        )
    return observations


def all_plans(compact: Compact, pairs: Pairs, draws: int = 30) -> list[tuple[traces.Plan, FunctionHidden]]:
    rng = random.Random(5)
    plans = [(traces.plan(p, h, compact, rng), h) for p, h in pairs for _ in range(draws)]
    return [(plan, hidden) for plan, hidden in plans if plan]


def split_turns(ids: list[int], compact: Compact) -> list[list[int]]:
    """The generations of a trace: what stands between prompt or observation and the next stop token."""
    body, turns = ids[ids.index(compact.end) + 1 :], []
    while body:
        stop = next(i for i, token in enumerate(body) if token in compact.stop_tokens)
        turns.append(body[: stop + 1])
        body = body[stop + 1 :]
        if body and body[0] == compact.obs:
            body = body[body.index(compact.end) + 1 :]
        if body and body[0] == compact.sum:
            body = body[1:]
    return turns


def test_every_trace_ends_solved_tested_and_submitted(compact: Compact, train_pairs: Pairs) -> None:
    checked = 0
    for plan, hidden in all_plans(compact, train_pairs):
        if plan.summarise:
            continue
        (sample,) = traces.write(plan, executed(plan), compact)
        workspace, tools = Files(plan.problem.files), []
        for turn in split_turns(sample.ids, compact):
            for action in compact.actions(turn):
                assert not action.error
                tools.append(action.tool)
                try:
                    if action.tool is Tool.edit:
                        workspace = workspace.edit(action)
                    elif action.tool is Tool.undo:
                        workspace = workspace.undo()
                except ValueError:
                    assert plan.broken
        assert tools[-2:] == [Tool.test, Tool.submit]
        (source,) = workspace.files.values()
        for case in [*plan.problem.visible, *hidden.cases]:
            assert outcome(source, decode(case.args)) == case.expected
        checked += 1
    assert checked > 100


def test_after_every_edit_comes_a_test_and_after_every_failure_an_undo(compact: Compact, train_pairs: Pairs) -> None:
    retried = 0
    for plan, _ in all_plans(compact, train_pairs):
        if plan.summarise or plan.broken:
            continue
        (sample,) = traces.write(plan, executed(plan), compact)
        turns = [[a.tool for a in compact.actions(turn)] for turn in split_turns(sample.ids, compact)]
        assert turns[-1] == [Tool.submit]
        assert turns[0] == [Tool.edit, Tool.test]
        assert all(turn == [Tool.undo, Tool.edit, Tool.test] for turn in turns[1:-1])
        retried += len(turns) > 2
    assert retried > 50


def test_wrong_edits_and_observations_carry_no_loss_and_everything_else_said_does(
    compact: Compact, train_pairs: Pairs
) -> None:
    for plan, _ in all_plans(compact, train_pairs):
        for sample in traces.write(plan, executed(plan), compact):
            text = compact.text([i for i, w in zip(sample.ids, sample.weights, strict=True) if w == Weight.action])
            assert "<obs>" not in text
            for attempt in plan.tries:
                without = text.replace(compact.text(plan.repair), "")
                if not plan.summarise and attempt.call != plan.repair:
                    assert compact.text(attempt.call) not in without
            said = [i for i, w in zip(sample.ids, sample.weights, strict=True) if w == Weight.action]
            assert said[-1] in compact.stop_tokens


def test_a_candidate_that_passes_the_visible_tests_is_no_wrong_try(compact: Compact, train_pairs: Pairs) -> None:
    plan = next(plan for plan, _ in all_plans(compact, train_pairs) if plan.tries and not plan.broken)
    passing = [Observation(Tool.test) for _ in plan.tries]
    (sample,) = traces.write(plan, passing, compact)
    assert compact.undo not in sample.ids


def test_a_summary_lists_the_edits_tried_and_opens_the_next_segment(compact: Compact, train_pairs: Pairs) -> None:
    plan = next(p for p, _ in all_plans(compact, train_pairs) if p.summarise and len(p.tries) == 1 and not p.broken)
    observations = executed(plan)
    if observations[0].failing is None:
        pytest.skip("the candidate happens to pass")
    first, second = traces.write(plan, observations, compact)
    summary = plan.tries[0].call[1:]
    assert first.ids[-len(summary) - 2 :] == [compact.sum, *summary, compact.done]
    prompt = compact.prompt(plan.problem, plan.tries[0].files, tuple(summary))
    assert second.ids[: len(prompt)] == prompt
    assert second.ids[len(prompt)] == compact.undo


def test_the_verdict_names_the_first_failing_case(train_pairs: Pairs) -> None:
    from shared.sandbox import CallResult

    problem, _ = train_pairs[0]
    right = [CallResult(case.expected) for case in problem.visible]
    assert traces.verdict(problem, right).failing is None
    wrong = [right[0], CallResult(encode("no"))]
    assert (traces.verdict(problem, wrong).failing, traces.verdict(problem, wrong).got) == (1, encode("no"))
    died = [CallResult(None, "Timeout"), right[1]]
    assert (traces.verdict(problem, died).failing, traces.verdict(problem, died).got) == (0, "Timeout")
