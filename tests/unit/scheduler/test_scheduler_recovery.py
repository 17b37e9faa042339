"""A ledger that has lost its last commits: what it recognises by name, and what it costs."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from sqlalchemy import Engine

from services.scheduler import recovery
from services.scheduler.decisions import drop
from services.scheduler.desk import Desk
from services.scheduler.records import GROUPS_PER_PROBLEM
from services.scheduler.recovery import Checkpointed
from services.scheduler.store import Store
from services.scheduler.working_set import WorkingSet
from shared.contracts import messages as m
from shared.contracts.ids import group_id
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN


@pytest.fixture
def room(engine: Engine) -> Room:
    return Room(engine).begin(problems=40)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names of every search through the catalogue."""
    made: list[set[str]] = []
    search = recovery._search

    def counted(ws: WorkingSet, wanted: Collection[str]) -> dict[str, str]:
        made.append(set(wanted))
        return search(ws, wanted)

    monkeypatch.setattr(recovery, "_search", counted)
    return made


def load(room: Room, *groups: str, step: int = 1) -> None:
    """Load the run again, beside a checkpoint that contains these groups."""
    saved = Checkpointed(0, step, step, frozenset(groups))
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config, read_checkpoint=lambda run: saved)
    room.tell()


def commit(room: Room, step: int, *groups: str) -> None:
    assert not room.tell(
        m.StepCommitted(run=RUN, incarnation=0, step=step, serial=step, groups=dict.fromkeys(groups, 0))
    )


def is_free(room: Room, problem: str) -> bool:
    return bool(room.ws.catalogue.free_ones()[room.ws.catalogue.handle(problem)])


def is_taken(room: Room, problem: str) -> bool:
    """Neither free nor practised."""
    return not is_free(room, problem) and problem in unopened(room)


def unopened(room: Room) -> list[str]:
    opened = {group.problem for group in room.ws.open.values()}
    return [problem for problem in room.ws.catalogue.ids if problem not in opened]


def test_all_strangers_of_a_checkpoint_are_looked_for_in_one_search(room: Room, searches: list[set[str]]) -> None:
    lost = unopened(room)[:2]
    names = {group_id(RUN, lost[0], 0), group_id(RUN, lost[1], 1), "g-of-no-problem"}
    load(room, *names)
    assert searches == [names]
    assert all(is_taken(room, problem) for problem in lost)


def test_strangers_of_no_problem_cost_one_search_however_many_steps_name_them(
    room: Room, searches: list[set[str]]
) -> None:
    for step in range(1, 6):
        commit(room, step, "g-again", f"g-{step}")
    assert searches == [{"g-again", "g-1"}]


def test_as_long_as_strangers_are_recognised_the_next_ones_are_looked_for(room: Room, searches: list[set[str]]) -> None:
    lost = unopened(room)[:3]
    for step, problem in enumerate(lost, 1):
        commit(room, step, group_id(RUN, problem, 0), "g-of-no-problem")
        assert is_taken(room, problem)
    assert searches[1:] == [{group_id(RUN, problem, 0)} for problem in lost[1:]]


def test_a_problem_that_was_lost_with_its_group_is_not_practised_again_when_it_is_admitted(room: Room) -> None:
    load(room, group_id(RUN, "lost", 1))
    problems = dict.fromkeys(("lost", "new"), ("debugging", "cell"))
    room.tell(m.ProblemAdmitted(run=RUN, pack=REF, pack_hidden=REF, problems=problems))
    assert is_taken(room, "lost")
    assert is_free(room, "new")


def finish(room: Room) -> str:
    """Let a group become ready."""
    group = next(iter(room.ws.open.values()))
    room.tell(*[room.scored(room.key(attempt)) for attempt in group.attempts])
    return group.id


def give_up(room: Room, problem: str) -> None:
    """Let the run drop the open group of a problem, as if too few of its attempts had survived."""
    group = next(group for group in room.ws.open.values() if group.problem == problem)
    drop(room.ws, group, "too few attempts survived", room.now)


def test_a_checkpoint_whose_step_is_not_committed_yet_leaves_out_no_numbers(room: Room) -> None:
    ready = [finish(room) for _ in range(3)]
    load(room, *ready)
    assert not room.ws.waiting
    assert {room.ws.catalogue.next_number(problem) for problem in unopened(room)} <= {0, 1}


def test_a_ledger_that_has_lost_more_than_one_step_leaves_numbers_out(room: Room) -> None:
    """Also where it knows all groups, and has read the newest step or all but that."""
    ready = [finish(room) for _ in range(6)]
    commit(room, 2, *ready[3:])
    load(room, *ready, step=2)
    assert {room.ws.catalogue.next_number(problem) for problem in unopened(room)} <= {2, 3}
    load(room, *ready, *[finish(room) for _ in range(3)], step=3)
    assert {room.ws.catalogue.next_number(problem) for problem in unopened(room)} <= {2, 3}


@pytest.mark.parametrize("loads", [1, 2, 3])
def test_left_out_numbers_take_no_chance_away_from_a_problem(engine: Engine, loads: int) -> None:
    """Whether the run is loaded again after each of its groups or not."""
    room = Room(engine).begin(problems=2)
    stranger = "g-of-no-problem"
    load(room, stranger)
    problem = next(iter(room.ws.open.values())).problem
    for chance in range(1, GROUPS_PER_PROBLEM + 1):
        give_up(room, problem)
        assert is_free(room, problem) is (chance < GROUPS_PER_PROBLEM)
        room.tell()
        if chance < loads:
            load(room, stranger)
    load(room, stranger)
    assert is_taken(room, problem)
    numbers = [number for (number,) in room.sql(f"select number from groups where problem_id = '{problem}' order by 1")]
    assert len(numbers) == GROUPS_PER_PROBLEM
    assert numbers[1] >= (3 if loads > 1 else 1)
