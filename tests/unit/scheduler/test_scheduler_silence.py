"""Silence is a worker's own only where somebody listened, and a grader's only where others are graded."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import Engine

from shared.ledger.transitions import AttemptState
from tests.unit.scheduler.world import RUN, World, config

LEASE_S = 5.0


@pytest.fixture
def world(engine: Engine) -> World:
    world = World(engine, config(lease_s=LEASE_S), duration=(1000, 1000))
    world.start()
    while len(world.running) < 8:
        world.tick()
    while world.inbox:
        world.schedule()
    assert states(world)[AttemptState.claimed] >= 8
    return world


def states(world: World) -> Counter[AttemptState]:
    return Counter(attempt.state for attempt in world.desk.sets[RUN].attempts.values())


def let_pass(world: World, seconds: float, **listening: bool) -> None:
    until = world.now + seconds
    while world.now < until:
        world.now += 1.0
        world.desk.handle([], world.now, {}, **listening)


def test_while_nobody_listens_no_lease_runs_out(world: World) -> None:
    before = states(world)
    let_pass(world, 20 * LEASE_S, listening=False)
    assert states(world) == before
    assert not world.desk.overdue(world.now + LEASE_S - 1)


def test_while_a_run_is_paused_silence_that_nobody_listens_to_is_borne_too(world: World) -> None:
    world.pause()
    while world.inbox:
        world.schedule()
    before = states(world)
    assert world.desk.overdue(world.now + LEASE_S + 1)
    let_pass(world, 20 * LEASE_S, listening=False)
    assert states(world) == before


def test_a_lease_begins_anew_when_somebody_listens_again(world: World) -> None:
    claimed = states(world)[AttemptState.claimed]
    let_pass(world, 20 * LEASE_S, listening=False)
    let_pass(world, LEASE_S - 1)
    assert states(world)[AttemptState.claimed] == claimed
    assert world.desk.overdue(world.now + 2)
    let_pass(world, 3)
    assert states(world)[AttemptState.claimed] == 0


def finish(world: World, *, graded: bool) -> str:
    """One attempt ends, and gets a verdict or none. Returns its name."""
    name, running = next(iter(world.running.items()))
    del world.running[name]
    world.finish(running)
    if not graded:
        world.inbox.pop()  # the verdict
    while world.inbox:
        world.schedule()
    return name


def test_a_missing_verdict_is_given_up_later_while_nobody_is_graded(world: World) -> None:
    name = finish(world, graded=False)
    grading_s = 600.0
    let_pass(world, grading_s + 5)
    assert world.desk.sets[RUN].attempts[name].state is AttemptState.finished
    let_pass(world, 6 * grading_s)
    assert world.desk.sets[RUN].attempts[name].epoch == 1


def test_a_missing_verdict_is_given_up_in_time_where_others_are_graded(world: World) -> None:
    name = finish(world, graded=False)
    world.now += 1.0
    finish(world, graded=True)
    let_pass(world, 605)
    assert world.desk.sets[RUN].attempts[name].epoch == 1
