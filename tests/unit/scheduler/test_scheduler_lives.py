"""A scheduler that dies again and again still comes to the end of every patience, and a ledger that has lost who trains and what is
served learns it by itself."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.listening import KEPT_GAPS, Listening
from shared.contracts import messages as m
from shared.ledger.transitions import AttemptState
from tests.unit.scheduler.harsh import in_memory
from tests.unit.scheduler.world import RUN, Trouble, World, config

LIFE_S = 40.0  # of a scheduler, in steps of a second


def let_pass(world: World, seconds: float, *, tick: bool = False) -> list[Any]:
    """Return what is said meanwhile, by schedulers of which each lives for LIFE_S. `tick`: everybody else lives too."""
    seen, until, dies_at = len(world.published), world.now + seconds, world.now + LIFE_S
    while world.now < until:
        if world.now >= dies_at:
            world.restart()
            dies_at += LIFE_S
        if tick:
            world.tick()
        else:
            world.now += 1.0
            world.schedule()
    return [one.message for one in world.published[seen:]]


def working(engine: Any, **schedule: Any) -> World:
    world = World(engine, config(**schedule), duration=(1000, 1000))
    world.start()
    while len(world.running) < 8:
        world.tick()
    while world.inbox:
        world.schedule()
    return world


def test_the_world_that_once_stood_still_ends() -> None:
    trouble = Trouble(duplicate=0.05, worker_dies=0.08, grading_fails=0.05, scheduler_dies=0.25)
    with in_memory() as engine:
        world = World(engine, config(max_steps=8, max_staleness=2), seed=9, trouble=trouble, checkpoint_every=3)
        world.start()
        world.run_until("finished", ticks=2000)
        assert world.step == 8


def test_a_missing_verdict_is_asked_for_again_however_often_the_scheduler_dies() -> None:
    with in_memory() as engine:
        world = working(engine, lease_s=10_000.0)
        names = sorted(world.running)[:2]
        for name in names:
            world.now += 1.0
            world.finish(world.running.pop(name))
            if name == names[0]:
                world.inbox.pop()  # the verdict
            while world.inbox:
                world.schedule()
        said = [one for one in let_pass(world, 800.0) if isinstance(one, m.RolloutFinished)]
        assert [one.key.attempt for one in said] == [names[0]]
        assert world.desk.sets[RUN].attempts[names[0]].state is AttemptState.scored


def test_requests_that_the_bus_has_lost_are_repeated_however_often_the_scheduler_dies() -> None:
    with in_memory() as engine:
        world = World(engine, config())
        world.start()
        world.held = True
        let_pass(world, 60.0, tick=True)
        lost = {request.key.attempt for request in world.queue}
        assert lost
        world.queue.clear()
        said = let_pass(world, 1200.0, tick=True)
        assert {one.key.attempt for one in said if isinstance(one, m.RolloutRequested)} == lost


def test_a_run_without_free_problems_ends_however_often_the_scheduler_dies() -> None:
    with in_memory() as engine:
        world = World(engine, config(), problems=7)
        world.start()
        said = let_pass(world, 600.0, tick=True)
        assert "finished" in {one.state for one in said if isinstance(one, m.RunStatus)}


def test_a_finished_rollout_that_cannot_be_graded_ends_nobodys_work_when_it_is_said_again() -> None:
    with in_memory() as engine:
        world = working(engine, lease_s=10_000.0)
        name = min(world.running)
        world.trouble.grading_fails = 1.0
        world.random.choice = lambda options: options[0]  # type: ignore[method-assign]
        world.finish(world.running.pop(name))
        (finished, _) = list(world.inbox)
        world.trouble.grading_fails = 0.0
        let_pass(world, 5.0)
        attempt = world.desk.sets[RUN].attempts[name]
        assert (attempt.epoch, attempt.state) == (1, AttemptState.requested)
        world.inbox.append(finished)
        assert not [one for one in let_pass(world, 5.0) if isinstance(one, m.AttemptCancel)]
        assert attempt.epoch == 1
        assert attempt.state is not AttemptState.finished


def test_a_ledger_that_has_lost_that_the_trainer_began_goes_on() -> None:
    """The message is acknowledged and never applied, as on a ledger that was put back to what it was before."""
    with in_memory() as engine:
        world = World(engine, config(max_steps=6))
        world.start()
        world.inbox = type(world.inbox)(s for s in world.inbox if not isinstance(s.message, m.IncarnationStarted))
        world.claims.clear()
        for _ in range(30):
            world.tick()
        assert world.step == 0
        world.claims.append(m.IncarnationStarted(run=RUN, incarnation=0, step=0, parent=-1))
        world.restart()
        world.run_until("finished", ticks=2000)
        assert world.step == 6


def test_what_a_scheduler_hands_on_of_its_listening_counts_for_no_more_than_it_heard() -> None:
    first, now = Listening(), 1000.0
    for number in range(1000):
        now += 20.0 if number % 3 == 0 else 1.0
        first.batch(now, heard=True, upto=None)
    state = first.state()
    assert len(state["ends"]) <= KEPT_GAPS
    second = Listening()
    second.resume(state)
    second.batch(now + 500.0, heard=True, upto=None)
    assert second.since(now) <= 0.0  # what was said since then may be unread
    second.batch(now + 501.0, heard=True, upto=None)
    first.batch(now + 500.0, heard=True, upto=None)
    first.batch(now + 501.0, heard=True, upto=None)
    for then in range(1000, int(now), 17):
        assert second.since(float(then)) <= first.since(float(then)) + 1e-6
    assert second.since(now - 30.0) == pytest.approx(first.since(now - 30.0))
