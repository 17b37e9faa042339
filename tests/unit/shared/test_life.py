"""A run's life: which commands apply when, and that no order of them leaves the states that there are."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.life import UNFINISHED, Action, RunState, after, moves, offered

ACTIONS: tuple[Action, ...] = get_args(Action)


@given(st.lists(st.sampled_from(ACTIONS), max_size=20))
def test_commands_lead_only_along_the_moves_and_the_same_again_changes_nothing(actions: list[Action]) -> None:
    state = RunState.announced
    for action in actions:
        then = after(state, action)
        if then is not None:
            assert then is state or then in moves(state)
            assert after(then, action) in (None, then)
            state = then


@given(st.lists(st.sampled_from(ACTIONS), max_size=20))
def test_no_run_goes_back_to_before_its_start_and_commands_alone_finish_none(actions: list[Action]) -> None:
    states = [RunState.running]
    for action in actions:
        states.append(after(states[-1], action) or states[-1])
    assert not {RunState.announced, RunState.finished}.intersection(states)


@pytest.mark.parametrize("state", RunState)
def test_what_people_are_offered_applies(state: RunState) -> None:
    assert all(after(state, action) is not None for action in offered(state))
    assert bool(offered(state)) == (state in UNFINISHED)


@pytest.mark.parametrize("state", RunState)
def test_every_run_can_come_to_its_end_and_go_on_from_there(state: RunState) -> None:
    reached, todo = {state}, [state]
    while todo:
        new = moves(todo.pop()) - reached
        reached |= new
        todo += new
    assert {RunState.finished, RunState.running} <= reached
    assert state not in moves(state)


def test_a_run_starts_once_and_a_finished_one_is_only_resumed() -> None:
    assert [state for state in RunState if after(state, "start")] == [RunState.announced]
    assert [action for action in ACTIONS if after(RunState.finished, action)] == ["resume"]
