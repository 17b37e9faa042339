"""Silence is a worker's own only where somebody listened, and a grader's only where others are graded."""

from __future__ import annotations

from collections import Counter

import pytest
from sqlalchemy import Engine

from shared.contracts import messages as m
from shared.ledger.transitions import AttemptState
from tests.unit.scheduler.world import REF, RUN, World, config

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


def graded_again(world: World, seconds: float) -> list[m.RolloutFinished]:
    said: list[m.RolloutFinished] = []
    until = world.now + seconds
    while world.now < until:
        world.now += 1.0
        outbox = world.desk.handle([], world.now, {}).outbox
        said += [one.message for _, one in outbox if isinstance(one.message, m.RolloutFinished)]
    return said


def test_a_missing_verdict_is_asked_for_again_later_while_nobody_is_graded_and_nothing_is_sampled_again(
    world: World,
) -> None:
    name = finish(world, graded=False)
    grading_s = 600.0
    assert graded_again(world, 6 * grading_s - 5) == []
    (again,) = graded_again(world, 10)
    assert (again.key.attempt, again.key.epoch, again.trajectory) == (name, 0, REF)
    let_pass(world, 20 * grading_s)
    attempt = world.desk.sets[RUN].attempts[name]
    assert (attempt.state, attempt.epoch) == (AttemptState.finished, 0)  # graders that are away say nothing about it


def test_a_missing_verdict_is_asked_for_in_time_where_others_are_graded_and_given_up_only_after_several_times(
    world: World,
) -> None:
    name = finish(world, graded=False)
    world.now += 1.0
    finish(world, graded=True)
    assert [again.key.attempt for again in graded_again(world, 605)] == [name]
    assert world.desk.sets[RUN].attempts[name].epoch == 0
    world.now += 1.0
    finish(world, graded=True)
    let_pass(world, 605)
    finish(world, graded=True)
    let_pass(world, 605)
    assert world.desk.sets[RUN].attempts[name].epoch == 1


def test_a_fork_is_no_silence_and_ends_none(world: World) -> None:
    """The run is loaded again at every life of the trainer. Leases go on meanwhile."""
    for _ in range(6):
        let_pass(world, LEASE_S - 3)
        world.begin_incarnation()
        while world.inbox:
            world.schedule()
    assert states(world)[AttemptState.claimed] == 0


@pytest.mark.parametrize("batch_s", [2.9, 3.1, 20.0])
def test_slow_batches_put_off_no_lease_and_no_grading_limit_without_end(world: World, batch_s: float) -> None:
    name = finish(world, graded=False)
    world.now += 1.0
    finish(world, graded=True)
    said: list[m.RolloutFinished] = []
    for _ in range(300):
        world.now += batch_s
        outbox = world.desk.handle([], world.now, {}).outbox
        said += [one.message for _, one in outbox if isinstance(one.message, m.RolloutFinished)]
    assert states(world)[AttemptState.claimed] == 0
    assert name in {again.key.attempt for again in said}
