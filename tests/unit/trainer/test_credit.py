"""Credit: which turn of an attempt earned its reward."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.trainer import credit
from services.trainer.loss import advantages
from shared.contracts.messages import AttemptKey, Effort, StopReason
from shared.contracts.run import Credit, LengthPenalty
from shared.contracts.trajectory import Segment, Span, Trajectory
from shared.length import charges, cost, length_penalty

EDIT, SUBMIT, BROKEN, AGAIN, GIVE_UP, CUT = "edit", "submit", "broken", "again", "give up", "cut"
FAULTS = {AGAIN: "repeated", GIVE_UP: "gave_up", CUT: "endless"}
PROMPT, CALL, ANSWER = 3, 2, 2  # tokens


def attempt(*turns: str, spans: bool = True) -> Trajectory:
    """One segment: a prompt, then per turn a call of two tokens and an answer of two."""
    length = PROMPT + len(turns) * (CALL + ANSWER)
    mask, told = np.zeros(length, bool), [Span(start=0, end=PROMPT, role="prompt")]
    for i, (turn, following) in enumerate(zip(turns, (*turns[1:], ""), strict=True)):
        start = PROMPT + i * (CALL + ANSWER)
        mask[start : start + CALL] = True
        role, tool = ("final", "submit") if turn in (SUBMIT, GIVE_UP) else ("tool_call", "edit")
        told.append(
            Span(
                start=start,
                end=start + CALL,
                role=role,
                turn=i + 1,
                tool=tool,
                ok=turn not in (BROKEN, CUT),
                fault=FAULTS.get(turn, ""),
            )
        )
        told.append(
            Span(
                start=start + CALL,
                end=start + CALL + ANSWER,
                role="tool_output",
                turn=i + 1,
                passed=following in (SUBMIT, CUT),
            )
        )
    segment = Segment(
        tokens=np.zeros(length, np.int32),
        loss_mask=mask,
        logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        oldest_kv_version=0,
        spans=told if spans else [],
    )
    key = AttemptKey(attempt="a", epoch=0, group="g", problem="p", index=0)
    return Trajectory(key=key, stop=StopReason.submitted, temperature=1.0, effort=Effort(), segments=[segment])


def per_turn(row: np.ndarray) -> list[float]:
    return [float(row[i]) for i in range(PROMPT, len(row), CALL + ANSWER)]


TURN = Credit(per="turn", discount=0.5, faults={"broken": 0.25, "repeated": 0.125, "gave_up": 0.5, "endless": 0.75})
turns_drawn = st.lists(st.sampled_from([EDIT, BROKEN, AGAIN, SUBMIT, GIVE_UP]), min_size=1, max_size=6)


def test_the_turn_that_solved_it_earns_more_than_those_that_failed_before() -> None:
    assert credit.turn_returns(attempt(EDIT, EDIT, EDIT, SUBMIT), 1.0, TURN) == {1: 0.25, 2: 0.5, 3: 1.0, 4: 1.0}
    myopic = Credit(per="turn", discount=0.0, faults={})
    assert credit.turn_returns(attempt(EDIT, EDIT, SUBMIT), 1.0, myopic) == {1: 0.0, 2: 1.0, 3: 1.0}


def test_broken_and_repeated_turns_lose_whatever_comes_of_the_attempt() -> None:
    assert credit.turn_returns(attempt(BROKEN, EDIT, AGAIN), 0.0, TURN) == {1: -0.25, 2: 0.0, 3: -0.125}
    assert credit.turn_returns(attempt(EDIT, GIVE_UP), 0.0, TURN) == {1: 0.0, 2: -0.5}
    # a broken call changed nothing: it does not delay the credit of the turn before it
    assert credit.turn_returns(attempt(EDIT, BROKEN, SUBMIT), 1.0, TURN) == {1: 1.0, 2: 0.75, 3: 1.0}


def test_a_generation_without_end_is_a_fault() -> None:
    """Else a policy that never ends a call would break none."""
    assert credit.turn_returns(attempt(EDIT, CUT), 0.0, TURN) == {1: 0.0, 2: -0.75}


def test_of_the_groups_in_which_nothing_was_earned_a_share_teaches_its_faults() -> None:
    group = [attempt(BROKEN, EDIT), attempt(EDIT, GIVE_UP)]
    left_out = credit.assign(group, [0.0, -0.1], TURN, lot=TURN.failed_share)
    assert not any(row.any() for (row,) in left_out)
    (broke, _), (edited, gave_up) = (
        per_turn(row) for (row,) in credit.assign(group, [-0.3, 0.0], TURN, lot=0.99 * TURN.failed_share)
    )
    assert broke < 0 < edited
    assert gave_up < 0


def test_what_the_reward_takes_from_attempts_that_failed_reaches_their_turns() -> None:
    """`apply = all` of the length penalty and of behaviour terms."""
    rewards = [-0.05, -0.4, -0.1, -0.2]
    found = credit.assign([attempt(EDIT) for _ in rewards], rewards, TURN, lot=0.0)
    assert [per_turn(row)[0] for (row,) in found] == pytest.approx(advantages(rewards).tolist())


@given(st.lists(st.tuples(turns_drawn, st.floats(-1, 1)), min_size=2, max_size=5))
def test_a_group_that_is_credited_by_turn_sums_to_zero_over_its_turns(drawn: list[tuple[list[str], float]]) -> None:
    found = credit.assign([attempt(*turns) for turns, _ in drawn], [r for _, r in drawn], TURN, lot=0.0)
    assert abs(sum(sum(per_turn(row)) for (row,) in found)) < 1e-4


@given(st.lists(st.tuples(turns_drawn, st.floats(-1, 1)), min_size=2, max_size=5), st.booleans())
def test_credit_by_attempt_is_dr_grpo(drawn: list[tuple[list[str], float]], spans: bool) -> None:
    rewards = [r for _, r in drawn]
    found = credit.assign([attempt(*turns, spans=spans) for turns, _ in drawn], rewards, Credit(per="attempt"), lot=0.0)
    for (row,), (turns, _), expected in zip(found, drawn, advantages(rewards), strict=True):
        assert per_turn(row) == [expected] * len(turns)
        assert row[:PROMPT].tolist() == [0.0] * PROMPT
        assert row[PROMPT + CALL] == 0.0


def test_without_discount_and_losses_equal_attempts_are_dr_grpo_too() -> None:
    plain = Credit(per="turn", discount=1.0, faults={})
    found = credit.assign([attempt(EDIT, EDIT), attempt(BROKEN, AGAIN)], [1.0, 0.0], plain, lot=0.0)
    assert [per_turn(row) for (row,) in found] == [[0.5, 0.5], [-0.5, -0.5]]


def test_a_turn_is_compared_with_turns_that_began_alike() -> None:
    """Second tries succeed less often than first ones: that must not count against trying again."""
    myopic = Credit(per="turn", discount=0.0, faults={})
    (first,), (second,), (third,) = credit.assign(
        [attempt(EDIT, SUBMIT), attempt(EDIT, EDIT, SUBMIT), attempt(EDIT, EDIT)], [1.0, 1.0, 0.0], myopic, lot=0.0
    )
    assert np.allclose(per_turn(first), [2 / 3, 0.0])
    assert np.allclose(per_turn(second), [-1 / 3, 0.5, 0.0])
    assert np.allclose(per_turn(third), [-1 / 3, -0.5])


def test_turns_that_answer_the_task_alone_are_compared_with_each_other() -> None:
    """A retry that reads nothing else is a first try once more, unless a self-summary stood before it."""

    def after(first: Trajectory, *others: Trajectory, summary: bool = False) -> Trajectory:
        segments, turns = [], 0
        for one in (first, *others):
            (segment,) = one.segments
            spans = [replace(s, turn=s.turn + turns if s.turn else 0) for s in segment.spans]
            if summary and segments:
                spans.insert(1, Span(start=1, end=2, role="summary"))
            segments.append(replace(segment, spans=spans))
            turns = max(s.turn for s in spans)
        return replace(first, segments=segments)

    myopic = Credit(per="turn", discount=0.0, faults={})
    group = [after(attempt(EDIT), attempt(EDIT), attempt(EDIT, SUBMIT)), attempt(EDIT, EDIT)]
    ((one,), (two,), (three, done)), ((failed, second),) = (
        [per_turn(row) for row in rows] for rows in credit.assign(group, [1.0, 0.0], myopic, lot=0.0)
    )
    assert np.allclose([one, two, three, failed], [-0.25, -0.25, 0.75, -0.25])
    assert (done, second) == (0.0, 0.0)  # the only ones of their kind
    summarised = [after(attempt(EDIT), attempt(EDIT), summary=True), attempt(EDIT)]
    ((one,), (two,)), ((alone,),) = (
        [per_turn(row) for row in rows] for rows in credit.assign(summarised, [1.0, 0.0], myopic, lot=0.0)
    )
    assert (one, two, alone) == (0.0, 0.0, 0.0)


def test_what_was_recorded_without_spans_is_one_turn() -> None:
    found = credit.assign([attempt(EDIT, EDIT, spans=False), attempt(EDIT, spans=False)], [1.0, 0.0], TURN, lot=0.0)
    assert [per_turn(row) for (row,) in found] == [[0.5, 0.5], [-0.5]]


def test_rambling_on_after_a_test_that_passed_is_worse_than_submitting() -> None:
    """What a turn is compared with must not depend on what it does."""
    (submitted,), (rambled,) = credit.assign([attempt(EDIT, SUBMIT), attempt(EDIT, CUT)], [1.0, 1.0], TURN, lot=0.0)
    assert per_turn(submitted)[1] > 0 > per_turn(rambled)[1]


def spending(*turns: tuple[str, int, int], rest: int = 0, weird: int = 0) -> Trajectory:
    """An attempt whose turns (kind, sampled tokens, tokens of the answer) are counted in its effort. `rest`: tokens of an answer
    that the segments do not show. `weird`: calls that the effort does not count."""
    spans, length = [Span(start=0, end=PROMPT, role="prompt")], PROMPT
    for number, (kind, sampled, answer) in enumerate(turns, 1):
        final = kind in (SUBMIT, GIVE_UP)
        for role, size in ((("final" if final else "tool_call"), sampled), ("tool_output", answer)):
            if size:
                tool = "submit" if final else "edit"
                spans.append(
                    Span(start=length, end=length + size, role=role, turn=number, tool=tool, ok=kind != BROKEN)
                )
                length += size
    mask = np.zeros(length, bool)
    for span in spans:
        mask[span.start : span.end] = span.role in ("tool_call", "final")
    effort = Effort(
        tool_call_tokens=sum(size for kind, size, _ in turns if kind not in (SUBMIT, GIVE_UP)),
        final_tokens=sum(size for kind, size, _ in turns if kind in (SUBMIT, GIVE_UP)),
        tool_output_tokens=sum(answer for _, _, answer in turns) + rest,
        tool_calls=max(0, sum(size > 0 for _, size, _ in turns) - weird),
        turns=len(turns),
    )
    segment = Segment(
        tokens=np.zeros(length, np.int32), loss_mask=mask, logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), oldest_kv_version=0, spans=spans,
    )  # fmt: skip
    return replace(attempt(EDIT), segments=[segment], effort=effort)


spent = st.lists(
    st.tuples(st.sampled_from([EDIT, BROKEN, SUBMIT]), st.integers(1, 300), st.integers(0, 300)), min_size=1, max_size=8
)
penalties = st.builds(
    LengthPenalty,
    weight=st.floats(0, 10),
    k=st.floats(0, 100),
    q=st.floats(0, 4),
    unit_tokens=st.floats(0.1, 1e4),
    per_tool_call=st.floats(0, 5),
    per_turn=st.floats(0, 5),
)


@given(spent, penalties, st.integers(0, 100), st.integers(0, 2), st.randoms())
def test_turns_are_charged_for_length_what_their_own_effort_added_and_together_the_whole_penalty(
    turns: list[tuple[str, int, int]], penalty: LengthPenalty, rest: int, weird: int, order: Random
) -> None:
    trajectory = spending(*turns, rest=rest, weird=weird)
    owed = charges(trajectory, penalty)
    values = list(owed.values())
    order.shuffle(values)
    assert sum(values) == length_penalty(trajectory.effort, penalty)  # exactly, in any order
    assert list(owed) == list(range(1, len(turns) + 1))
    assert min(values) >= 0


def test_a_turn_is_charged_the_step_of_the_curve_that_it_went() -> None:
    penalty = LengthPenalty(weight=0.1, k=0.5, q=1.0, unit_tokens=10.0, per_tool_call=0.0, per_turn=1.0)
    owed = charges(spending((EDIT, 20, 10), (EDIT, 40, 0), (SUBMIT, 10, 0)), penalty)
    steps = [0.0, 3.5, 8.5, 10.5]
    assert list(owed.values()) == pytest.approx(
        [0.1 * (cost(b, 0.5, 1.0) - cost(a, 0.5, 1.0)) for a, b in pairwise(steps)], abs=1e-15
    )


def test_the_penalty_lies_on_the_turns_that_spent_and_not_on_the_one_that_solved() -> None:
    """Before, the whole of it lay on the last changing turn, which with fresh retries sees none of the others."""
    penalty = LengthPenalty(weight=0.1, k=0.0, unit_tokens=10.0, per_tool_call=0.0, per_turn=0.0)
    long = spending((EDIT, 100, 0), (EDIT, 10, 0), (SUBMIT, 10, 0))
    myopic = Credit(per="turn", discount=0.0, faults={})
    assert credit.turn_returns(long, 1.0, myopic, penalty) == pytest.approx({1: -1.0, 2: 0.9, 3: 0.9})
    short = spending((EDIT, 10, 0), (SUBMIT, 10, 0))
    rewards = [1.0 - 1.2, 1.0 - 0.2]
    first, other = (
        float(row[PROMPT])
        for (row,) in credit.assign([long, short], rewards, myopic, lot=0.0, lengths=[penalty, penalty])
    )
    assert (first, other) == pytest.approx((-0.95, 0.95))  # the turn that failed, and the one that solved it


def test_a_group_that_solved_its_problem_at_a_price_above_the_reward_is_no_failed_group() -> None:
    penalty = LengthPenalty(weight=1.0, k=0.0, unit_tokens=10.0, per_tool_call=0.0, per_turn=0.0)
    group = [spending((EDIT, 100, 0), (SUBMIT, 10, 0)), spending((EDIT, 200, 0), (SUBMIT, 10, 0))]
    found = credit.assign(group, [1 - 11.0, 1 - 21.0], TURN, lot=0.99, lengths=[penalty, penalty])
    assert all(row.any() for (row,) in found)


def test_sampled_tokens_without_spans_are_charged_too() -> None:
    bare = replace(attempt(EDIT, EDIT, spans=False), effort=Effort(thinking_tokens=4, turns=2))
    assert sum(charges(bare, LengthPenalty()).values()) == length_penalty(bare.effort, LengthPenalty())
