"""Several runs at once on one scheduler: fair shares of the slots, and engines that belong to one run at a time."""

from __future__ import annotations

import random

import pytest
from sqlalchemy import Engine

from services.scheduler import measures
from services.scheduler.audit import audit
from services.scheduler.shares import Use
from shared.contracts import messages as m
from shared.contracts.life import RunState
from shared.contracts.schedulable import objections
from shared.contracts.topics import RUNS_COMMANDS
from shared.ledger.transitions import AttemptState
from tests.unit.scheduler.several import Lasts, Several, share_of
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN, config

A, B, C = "r-a", "r-b", "r-c"
WITHIN = 0.05


def equal(chance: random.Random) -> float:
    return chance.uniform(5, 15)


def heavy(chance: random.Random) -> float:
    return min(200, 4 * chance.paretovariate(1.4))


@pytest.mark.parametrize(("a", "b"), [(equal, equal), (heavy, heavy)])
def test_two_runs_share_the_slots_as_they_are_told_to_while_a_third_joins_and_leaves_and_the_scheduler_dies(
    engine: Engine, a: Lasts, b: Lasts
) -> None:
    world = Several(engine, {A: a, B: b, C: equal})
    world.join(A, 7)
    world.join(B, 3)
    world.settle(20)  # no slot is taken yet
    world.run(150)
    world.kill(after_commit=True)
    world.run(150)
    world.kill(after_commit=False)
    world.run(150)
    assert world.shares(A, B)[A] == pytest.approx(0.7, abs=WITHIN)
    assert sum(world.used.values()) > 0.99 * 450 * world.slots  # none was empty
    world.join(C, 10)
    world.settle(20)  # until its first requests are taken
    world.run(400)
    found = world.shares(A, B, C)
    assert [found[run] for run in (A, B, C)] == pytest.approx([0.35, 0.15, 0.5], abs=WITHIN)
    world.leave(C)
    world.settle(20)
    world.run(400)
    assert world.used[C] == 0
    assert world.shares(A, B)[A] == pytest.approx(0.7, abs=WITHIN)
    assert sum(world.used.values()) > 0.99 * 400 * world.slots
    for run in (A, B, C):
        assert audit(engine, run, max_staleness=128).findings == []


def test_a_share_can_be_changed_while_the_run_goes_on(engine: Engine) -> None:
    world = Several(engine, {A: equal, B: equal})
    world.join(A, 7)
    world.join(B, 3)
    world.run(200)
    world.change(A, 1)
    world.settle(40)
    world.run(300)
    assert world.shares(A, B)[A] == pytest.approx(0.25, abs=WITHIN)


def test_a_paused_run_leaves_its_slots_to_the_others(engine: Engine) -> None:
    world = Several(engine, {A: equal, B: equal})
    world.join(A, 7)
    world.join(B, 3)
    world.run(100)
    world.say(RUNS_COMMANDS, m.RunCommand(run=A, action="pause", by="ann"))
    world.settle(40)
    world.run(100)
    assert world.shares(A, B)[B] == 1.0
    assert world.used[B] == 100 * world.slots
    world.say(RUNS_COMMANDS, m.RunCommand(run=A, action="resume", by="ann"))
    world.settle(40)
    world.run(250)
    assert world.shares(A, B)[A] == pytest.approx(0.7, abs=WITHIN)


def test_each_run_s_share_and_what_it_uses_are_told_and_of_a_run_alone_nothing(engine: Engine) -> None:
    world = Several(engine, {A: equal, B: equal})
    world.join(A, 7)
    world.run(50)
    assert "slots" not in measures.gate_words(world.working(A))
    world.join(B, 3)
    world.run(300)
    use = world.working(A).use
    assert use is not None
    assert use.share == pytest.approx(0.7)
    assert use.used == pytest.approx(0.7, abs=0.1)
    assert use.slots == sum(a.state is AttemptState.claimed for a in world.working(A).attempts.values())
    said = measures.gate_words(world.working(A))
    assert said.endswith(f"; share 70% of the slots, used {use.used:.0%} in the last minutes, holds {use.slots}")
    measured = measures.measure(world.desk.sets, set())
    assert measures.SLOTS.labels(B, "share")._value.get() == pytest.approx(0.3)
    assert measures.SLOTS.labels(A, "held")._value.get() == use.slots
    world.leave(B)
    world.run(5)
    measures.measure(world.desk.sets, measured)
    assert world.working(A).use is None
    assert measures.SLOTS.labels(A, "share")._value.get() == 1.0
    assert measures.SLOTS.labels(B, "share")._value.get() == 0.0
    measures.measure({}, {A, B})


def test_the_words_say_a_share_of_the_slots() -> None:
    assert measures._use_words(None) == ""
    assert measures._use_words(Use(0.25, 0.5, 3)) == "; share 25% of the slots, used 50% in the last minutes, holds 3"


@pytest.mark.parametrize("share", [0.0, -1.0, float("nan"), float("inf"), 1e-9, 1001.0])
def test_a_share_that_is_none_is_refused_with_what_is_allowed(share: float) -> None:
    assert objections(share_of(RUN, share)) == [f"schedule.share: found {share}; allowed: 0.001 to 1000"]


def test_an_engine_that_serves_another_run_has_left_the_first_which_asks_for_nothing_more(engine: Engine) -> None:
    room = Room(engine, config(groups_per_step=8)).begin()
    other = "r-other"
    room.tell(
        m.PolicyPublished(run=other, serial=0, incarnation=0, step=0, parent=-1, manifest=REF),
        m.PolicyApplied(run=other, replica="i", url="", serial=0, ok=False, reason="not to be had"),
    )
    assert "i" in room.ws.replicas  # it said that it does not serve the other one
    room.tell(m.PolicyApplied(run=other, replica="i", url="", serial=0))
    assert room.ws.replicas == {}
    assert "i" in room.desk.sets[other].replicas
    assert room.waits == {"an inference replica that serves this run's policy"}
    claimed = [m.AttemptClaimed(run=RUN, key=room.key(attempt), worker="w") for attempt in room.ws.attempts.values()]
    room.tell(*claimed)
    assert not any(isinstance(said, m.RolloutRequested) for said in room.said)
    room.tell(m.PolicyApplied(run=RUN, replica="i", url="", serial=0))
    assert any(isinstance(said, m.RolloutRequested) for said in room.said)
    assert "i" not in room.desk.sets[other].replicas


def test_a_new_engine_at_the_address_of_another_run_s_has_taken_its_place(engine: Engine) -> None:
    room = Room(engine).begin()
    room.tell(m.PolicyApplied(run=RUN, replica="old", url="http://e", serial=0))
    room.tell(m.PolicyPublished(run="r-other", serial=0, incarnation=0, step=0, parent=-1, manifest=REF))
    room.tell(m.PolicyApplied(run="r-other", replica="new", url="http://e", serial=0))
    assert set(room.ws.replicas) == {"i"}
    assert room.ws.head.state is RunState.running


def test_a_run_says_that_it_was_started_beside_others_also_after_a_kill(engine: Engine) -> None:
    world = Several(engine, {A: equal})
    world.join(A, 1.0)
    world.run(3)
    assert world.working(A).beside
    world.kill(after_commit=False)
    world.run(1)
    assert world.working(A).beside
