"""Whole runs with everything that can go wrong going wrong: the audit finds every promise kept."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, select

from services.scheduler.audit import audit, counts
from services.scheduler.desk import Desk
from services.scheduler.store import Store
from shared import ledger
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.ledger.models import Event
from tests.unit.scheduler.ledgers import opened
from tests.unit.scheduler.world import RUN, Trouble, World, config

chance = st.sampled_from([0.0, 0.05, 0.25])
troubles = st.builds(
    Trouble,
    duplicate=chance,
    delay=chance,
    worker_dies=st.sampled_from([0.0, 0.02, 0.08]),
    grading_fails=st.sampled_from([0.0, 0.05]),
    trainer_dies=st.sampled_from([0.0, 0.02, 0.05]),
    quarantines=st.sampled_from([0.0, 0.2]),
    scheduler_dies=chance,
)


def assert_sound(world: World, staleness: int = 2) -> None:
    report = audit(world.engine, RUN, max_staleness=staleness)
    assert report.findings == []
    assert not world.refused


def events(engine: Engine) -> list[Any]:
    with engine.begin() as connection:
        return list(connection.execute(select(Event.__table__).where(Event.run_id == RUN).order_by(Event.sequence)))


def bus_counts(world: World) -> dict[str, int]:
    """What somebody who reads the bus would count."""
    sent = [one.message for one in world.published]
    return {
        "rollouts.requested": len({(r.key.attempt, r.key.epoch) for r in sent if isinstance(r, m.RolloutRequested)}),
        "groups.ready": len({g.group for g in sent if isinstance(g, m.GroupReady)}),
    }


# Not shrunk: a world is seconds of work, and its seed and troubles are printed.
@settings(
    max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@given(troubles, st.integers(0, 10_000), st.sampled_from([0, 1, 2]), st.sampled_from([1, 2, 3]))
def test_whatever_goes_wrong_nothing_is_lost_or_trained_twice_or_too_old(
    tmp_path_factory: pytest.TempPathFactory, trouble: Trouble, seed: int, staleness: int, checkpoint_every: int
) -> None:
    with opened("sqlite", tmp_path_factory.mktemp("world")) as engine:
        run = config(max_steps=8, max_staleness=staleness)
        world = World(engine, run, seed=seed, trouble=replace(trouble), checkpoint_every=checkpoint_every)
        world.start()
        world.run_until("finished", ticks=2000)
        world.trouble = Trouble()
        for _ in range(5):
            world.tick()
        assert_sound(world, staleness)
        known = counts(engine, RUN)
        assert {topic: known[topic] for topic in bus_counts(world)} == bus_counts(world)


def test_a_run_works_on_every_ledger(any_engine: Engine) -> None:
    trouble = Trouble(duplicate=0.1, delay=0.1, worker_dies=0.03, trainer_dies=0.03, scheduler_dies=0.1)
    world = World(any_engine, config(max_steps=6), seed=7, trouble=trouble)
    world.start()
    world.run_until("finished")
    assert_sound(world)


def test_a_quiet_run_trains_every_group_in_the_ledgers_order_and_asks_for_no_more_than_needed(engine: Engine) -> None:
    world = World(engine, config(max_steps=8))
    world.start()
    world.run_until("finished")
    assert_sound(world)
    assert world.step == 8
    assert max(world.ages) <= 2
    assert len(world.trained) == 24
    announced = [one.message.sequence for one in world.published if isinstance(one.message, m.GroupReady)]
    assert announced == sorted(announced) == list(range(1, 25))
    progress = [one.message.progress for one in world.published if isinstance(one.message, m.GroupReady)]
    assert progress == sorted(progress)
    assert progress[0] == 0.0
    assert 0.5 < progress[-1] < 1.0  # of its 8 steps: the last groups are announced before the last is made
    assert counts(engine, RUN)["rollouts.requested"] == 24 * 4


def test_one_slow_attempt_holds_the_gate_instead_of_growing_old(engine: Engine) -> None:
    world = World(engine, config(max_steps=14), slow={9: 60}, capacity=60)
    world.start()
    world.run_until("finished")
    assert max(world.ages) <= 2
    assert_sound(world)


def test_no_problem_is_asked_for_twice_while_it_lives(engine: Engine) -> None:
    world = World(engine, config(max_steps=40), problems=130)
    world.start()
    world.run_until("finished")
    problems = Counter(one.message.problem for one in world.published if isinstance(one.message, m.GroupReady))
    assert max(problems.values()) == 1
    assert_sound(world)


def test_a_run_ends_when_every_problem_was_practised(engine: Engine) -> None:
    world = World(engine, config(), problems=20)
    world.start()
    world.run_until("finished")
    assert world.desk.sets[RUN].head.reason == "every problem was practised"
    assert len(world.trained) == 18  # six steps of three; two groups are left over
    assert_sound(world)


def test_a_fork_announces_again_what_it_freed_and_what_waits_in_the_ledgers_order(engine: Engine) -> None:
    world = World(engine, config(max_steps=12, max_staleness=4), checkpoint_every=3)
    world.start()
    while world.step < 4:
        world.tick()
    seen = len(world.published)
    world.begin_incarnation()  # step 4 is dead
    dead = {g for g, step in world.trained.items() if step > 3} | {g for g in world.groups}
    assert world.step == 3
    while world.inbox:
        world.schedule()
    said = [one.message for one in world.published[seen:] if isinstance(one.message, m.GroupReady)]
    again = [ready for ready in said if ready.incarnation == world.incarnation]
    assert [g.sequence for g in again] == sorted(g.sequence for g in again)
    assert again[0].sequence == 10  # the first that step 4 had trained
    assert not dead & set(world.trained)
    world.run_until("finished")
    assert_sound(world, staleness=4)
    assert world.step == 12


def begun(engine: Engine, problems: int) -> World:
    """Three groups wait for the trainer."""
    world = World(engine, config(), problems=problems)
    world.start()
    while len(world.groups) < 3:
        world.now += 1
        world.schedule()
        world.work()
    return world


def test_a_problem_is_never_trained_twice_when_a_dead_trainers_quarantine_comes_after_its_heir_was_told(
    engine: Engine,
) -> None:
    world = begun(engine, problems=12)
    group = min(world.groups)
    world.quarantine(group)
    world.begin_incarnation()
    while group not in world.groups:  # announced again, to the heir
        world.schedule()
    world.run_until("finished")
    assert group in world.trained
    assert_sound(world)


@pytest.mark.parametrize("ready", [False, True])
def test_what_was_drawn_again_ends_when_a_surviving_step_trains_the_problem_after_all(
    engine: Engine, ready: bool
) -> None:
    world = begun(engine, problems=4)
    first = min(world.groups.values(), key=lambda ready: ready.sequence)
    # Of a release that did not say whose word it is: the trainer that lives trains it all the same.
    world.send(t.GROUPS_QUARANTINED, m.GroupQuarantined(run=RUN, group=first.group, reason="not finite"))

    def drawn_again() -> list[str]:
        ws = world.desk.sets[RUN]
        groups = (ws.waiting if ready else ws.open).values()
        return [group.id for group in groups if group.problem == first.problem and group.id != first.group]

    while not drawn_again():
        world.now += 1
        world.schedule()
        if ready:
            world.work()
    (second,) = drawn_again()
    world.groups.pop(second, None)
    world.train()
    assert first.group in world.trained
    while world.inbox:
        world.schedule()
    assert not drawn_again()
    world.restart()
    world.run_until("finished")
    problems = [one.message.problem for one in world.published if isinstance(one.message, m.GroupReady)]
    assert problems.count(first.problem) <= 2  # nor a third time
    assert audit(engine, RUN, max_staleness=None).number("trained_twice") == 0
    reasons = {event.subject: event.data["reason"] for event in events(engine) if event.kind == "group.dropped"}
    assert reasons[second] == f"its problem was trained meanwhile, by {first.group}"


def test_what_a_fork_made_too_old_is_given_up_with_a_reason_and_never_trained(engine: Engine) -> None:
    world = World(engine, config(max_steps=14, max_staleness=0), checkpoint_every=100)
    world.start()
    while world.step < 5:
        world.tick()
    world.begin_incarnation()  # back to step 0: everything sampled since is from a branch that is dead
    world.run_until("finished")
    assert world.step == 14
    report = audit(engine, RUN, max_staleness=0)
    assert report.findings == []
    assert report.groups["dropped"] >= 12
    alerts = [one.message for one in world.published if isinstance(one.message, m.Alert)]
    assert "groups_dropped" in {alert.name for alert in alerts}


def test_a_budget_in_minutes_ends_the_run_and_drops_what_runs(engine: Engine) -> None:
    world = World(engine, config(minutes=1.0), slow={i: 1000 for i in range(40, 60)}, capacity=200)
    world.start()
    world.run_until("finished", ticks=200)
    statuses = [one.message for one in world.published if one.topic is t.RUNS_STATE]
    assert [one.state for one in statuses] == ["running", "stopping", "finished"]
    assert "minutes" in statuses[1].reason
    assert world.now - 1000 <= 75
    assert_sound(world)
    cancels = [one.message for one in world.published if isinstance(one.message, m.AttemptCancel)]
    assert cancels[-1].mode == "drop"
    assert not world.running


def test_the_clock_of_the_budget_stands_while_the_run_is_paused(engine: Engine) -> None:
    world = World(engine, config(minutes=1.0))
    world.start()
    for _ in range(10):
        world.tick()
    requested = counts(engine, RUN)["rollouts.requested"]
    world.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="pause"))
    for _ in range(300):
        world.tick()
    assert world.state == "paused"
    paused = counts(engine, RUN)["rollouts.requested"]
    assert paused - requested <= 9 * 4  # at most what it asked for before it heard of the pause
    world.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="resume"))
    world.run_until("finished", ticks=100)
    assert counts(engine, RUN)["rollouts.requested"] > paused
    assert_sound(world)


@settings(
    max_examples=5, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@given(troubles, st.integers(0, 10_000), st.lists(st.integers(1, 25), min_size=2, max_size=8))
def test_however_often_a_run_is_paused_and_whatever_goes_wrong_meanwhile_nothing_is_lost(
    tmp_path_factory: pytest.TempPathFactory, trouble: Trouble, seed: int, stretches: list[int]
) -> None:
    """`stretches`: ticks of running, of pause, of running …"""
    with opened("sqlite", tmp_path_factory.mktemp("world")) as engine:
        world = World(engine, config(max_steps=8), seed=seed, trouble=replace(trouble))
        world.start()
        for number, ticks in enumerate(stretches):
            for _ in range(ticks):
                world.tick()
            (world.resume if number % 2 else world.pause)()
        world.resume()
        world.run_until("finished", ticks=2000)
        world.trouble = Trouble()
        for _ in range(5):
            world.tick()
        assert_sound(world)


def test_a_paused_run_asks_for_nothing_finishes_what_runs_and_trains_what_is_complete(engine: Engine) -> None:
    world = World(engine, config(max_steps=12), trouble=Trouble(worker_dies=0.05), seed=3)
    world.start()
    for _ in range(12):
        world.tick()
    world.pause()
    while world.state != "paused":
        world.tick()
    asked = counts(engine, RUN)["rollouts.requested"]
    trained = len(world.trained)
    for _ in range(60):
        world.tick()
    assert counts(engine, RUN)["rollouts.requested"] == asked  # what was lost meanwhile is not asked for again either
    assert not world.running
    assert len(world.trained) > trained
    waiting = [g for g in world.groups.values() if g.group not in world.trained]
    assert len(waiting) < world.run_config.schedule.groups_per_step
    (who,) = [e.data for e in events(engine) if e.kind == "run.paused"]
    assert who["by"] == "alice"
    world.resume()
    world.run_until("finished")
    assert world.step == 12
    assert_sound(world)


def test_deadlines_and_leases_hold_while_a_run_is_paused(engine: Engine) -> None:
    world = World(engine, config(max_steps=4, group_min=2), slow={2: 10_000, 3: 10_000})
    world.desk = Desk(Store(engine), lambda ref: world.run_config, attempt_s=20)
    world.start()
    for _ in range(5):
        world.tick()
    world.pause()
    for _ in range(60):
        world.tick()
    assert world.state == "paused"
    assert not world.running  # told to submit at the limit, and they did
    world.resume()
    world.run_until("finished")
    assert_sound(world)


def test_a_run_that_is_started_and_paused_at_once_asks_for_nothing(engine: Engine) -> None:
    world = World(engine, config(max_steps=4))
    world.start()
    world.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="pause"))
    for _ in range(20):
        world.tick()
    assert counts(engine, RUN)["rollouts.requested"] == 0
    world.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="resume", config=world.desk.sets[RUN].head.config))
    world.run_until("finished")
    assert world.step == 4


def test_a_finished_run_can_be_resumed_with_a_larger_budget(engine: Engine) -> None:
    world = World(engine, config(max_steps=4))
    world.start()
    world.run_until("finished")
    world.run_config = config(max_steps=9)
    larger = m.Ref(key="larger", size=1, checksum="d" * 32)
    world.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="resume", config=larger))
    world.tick()
    world.run_until("finished")
    assert world.step == 9
    assert_sound(world)


def test_a_stop_by_hand_ends_the_run_and_says_so_once(engine: Engine) -> None:
    world = World(engine, config())
    world.start()
    for _ in range(12):
        world.tick()
    world.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="stop", reason="enough"))
    world.run_until("finished")
    statuses = [one.message for one in world.published if one.topic is t.RUNS_STATE]
    assert [(one.state, one.reason) for one in statuses[1:]] == [("stopping", "enough"), ("finished", "enough")]
    assert_sound(world)


@pytest.mark.parametrize("step_s", [20.0, 900.0])
@pytest.mark.parametrize("minutes", [False, True], ids=["by hand", "by its minutes"])
def test_a_stop_trains_every_complete_group_that_makes_a_step_however_long_steps_take(
    engine: Engine, step_s: float, minutes: bool
) -> None:
    run = config(minutes=8.5 * step_s / 60) if minutes else config()
    world = World(engine, run, step_s=step_s, duration=(1, 2))
    world.start()
    while world.step < 2 or (not minutes and len(world.groups.keys() - world.trained.keys()) < 6):
        world.tick(2.0)
    if not minutes:
        world.send(t.RUNS_COMMANDS, m.RunCommand(run=RUN, action="stop"))
    for _ in range(int(20 * step_s)):
        world.tick(2.0)
        if world.state == "finished" and world.begun is None:
            break
    assert world.state == "finished"
    assert len(world.groups.keys() - world.trained.keys()) < world.run_config.schedule.groups_per_step
    assert_sound(world)


@pytest.mark.parametrize("begun", [False, True], ids=["before any was taken up", "in the middle"])
def test_a_run_goes_on_whose_outstanding_requests_the_bus_has_lost(engine: Engine, begun: bool) -> None:
    world = World(engine, config(max_steps=6))
    world.start()
    if begun:
        while world.step < 3:
            world.tick()
    world.held = True  # no worker takes anything up
    for _ in range(60):
        world.tick()
    world.running.clear()
    world.queue.clear()
    world.held = False
    while world.queue or world.desk.sets[RUN].waiting:
        world.tick()
    for _ in range(20_000):
        if world.state == "finished":
            break
        world.tick(5.0)
    assert world.step == 6
    report = audit(engine, RUN, max_staleness=2)
    assert report.findings == []


@pytest.mark.parametrize("restarts", [False, True], ids=["the trainer lives on", "the trainer restarts"])
@pytest.mark.parametrize("lost", [1, 4])
def test_a_ledger_that_lost_its_last_commits_trains_nothing_twice_and_goes_on(
    engine: Engine, tmp_path: Path, lost: int, restarts: bool
) -> None:
    """A database is put back to what it was `lost` steps ago. Nothing that was acknowledged since comes again. The outbox that was
    put back says once more what it did not know to be sent."""
    world = World(engine, config(max_steps=16), checkpoint_every=1, seed=3)
    world.start()
    problems: dict[str, str] = {}

    def tick() -> None:
        world.tick()
        problems.update({ready.group: ready.problem for ready in world.groups.values()})

    while world.step < 5:
        tick()
    with contextlib.closing(sqlite3.connect(tmp_path / "old.db")) as old:
        with contextlib.closing(sqlite3.connect(str(engine.url.database))) as new:
            new.backup(old)
    while world.step < 5 + lost:
        tick()
    while world.inbox:
        world.schedule()
    world.engine = ledger.connect(f"sqlite:///{tmp_path / 'old.db'}")
    said = len(world.published)
    world.restart()
    repeated = len([one for one in world.published[said:] if isinstance(one.message, m.RolloutRequested)])
    if restarts:
        world.begin_incarnation()
    for _ in range(2000):
        tick()
        if world.state == "finished":
            break
    report = audit(world.engine, RUN, max_staleness=2)
    world.engine.dispose()
    assert world.step == 16
    assert {finding.what for finding in report.findings} <= {"steps that the ledger has lost"}
    assert max(Counter(problems[group] for group in world.trained).values()) == 1
    requests = [one.message for one in world.published if isinstance(one.message, m.RolloutRequested)]
    assert len(requests) - len({(r.key.attempt, r.key.epoch) for r in requests}) == repeated


def test_the_same_seed_draws_the_same_problems_however_often_the_scheduler_is_restarted(tmp_path: Path) -> None:
    drawn = []
    for name, dies in (("a", 0.0), ("b", 0.5)):
        (tmp_path / name).mkdir()
        with opened("sqlite", tmp_path / name) as engine:
            world = World(engine, config(max_steps=3, hardness_sampling=False, max_staleness=0), seed=1)
            world.start()
            while world.inbox:
                world.schedule()
            world.trouble.scheduler_dies = dies
            world.run_until("finished")
            drawn.append(
                {one.message.key.problem for one in world.published if isinstance(one.message, m.RolloutRequested)}
            )
    assert drawn[0] == drawn[1]
