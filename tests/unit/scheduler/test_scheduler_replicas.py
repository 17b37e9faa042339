"""Replicas come and die for as long as a run lasts: what is kept of them, and said of them, has an end."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from services.scheduler.desk import Desk
from services.scheduler.records import ReplicaState
from services.scheduler.rotation import SILENT_S, gone, served
from services.scheduler.store import Store
from services.scheduler.working_set import HEARD_S
from shared.contracts import codec
from shared.contracts import messages as m
from shared.contracts import topics as t
from shared.contracts.messages import GONE_S, MUTE_S
from shared.ledger.transitions import AttemptState
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN

PATIENCE_S = 60.0


@pytest.fixture
def room(engine: Engine) -> Room:
    return Room(engine).begin()


def applied(name: str, serial: int = 0, **more: Any) -> m.PolicyApplied:
    return m.PolicyApplied(run=RUN, replica=name, url=more.pop("url", f"http://{name}"), serial=serial, **more)


def published(serial: int) -> m.PolicyPublished:
    return m.PolicyPublished(run=RUN, serial=serial, incarnation=0, step=serial, parent=serial - 1, manifest=REF)


def follow(room: Room, serial: int) -> None:
    """Version `serial` comes, and of all replicas only "i" takes it."""
    room.tell(published(serial), applied("i", serial))


def passing(room: Room, seconds: float) -> list[Any]:
    """Second after second, so that the scheduler has listened all the while. What it said."""
    said = []
    for _ in range(int(seconds)):
        room.now += 1
        room.tell()
        said += room.said
    return said


def kept(room: Room) -> tuple[set[str], set[str]]:
    """In memory, and in the ledger."""
    return set(room.ws.replicas), {name for (name,) in room.sql("select replica from replicas")}


def test_a_replica_that_died_without_a_word_is_forgotten_and_the_ledger_says_when(room: Room) -> None:
    room.tell(applied("dead"))
    follow(room, 1)
    passing(room, PATIENCE_S + GONE_S - 5)
    assert kept(room) == ({"dead", "i"}, {"dead", "i"})
    passing(room, 10)
    assert kept(room) == ({"i"}, {"i"})
    assert room.sql("select subject, epoch from events where kind = 'replica.forgotten'") == [("dead", 0)]


def test_one_that_lives_after_all_is_back_with_its_next_word(room: Room) -> None:
    room.tell(applied("slow"))
    follow(room, 1)
    passing(room, PATIENCE_S + GONE_S + 5)
    room.tell(applied("slow", 1))
    assert kept(room) == ({"slow", "i"}, {"slow", "i"})
    assert "slow" in room.ws.rotation(room.now, PATIENCE_S)


def test_one_that_left_in_order_is_forgotten_as_well(room: Room) -> None:
    room.tell(applied("left", ok=False, reason="it ends"))
    passing(room, GONE_S + 5)
    assert kept(room) == ({"i"}, {"i"})


def test_nobody_is_forgotten_for_a_silence_in_which_the_scheduler_did_not_listen(room: Room) -> None:
    room.tell(applied("there"))
    follow(room, 1)
    room.now += 10 * GONE_S
    room.tell()
    assert kept(room) == ({"there", "i"}, {"there", "i"})


def test_while_nothing_new_is_published_nobody_is_forgotten(room: Room) -> None:
    room.tell(applied("quiet"))
    passing(room, 2 * GONE_S)
    assert kept(room) == ({"quiet", "i"}, {"quiet", "i"})


def test_one_that_takes_over_an_address_replaces_whoever_had_it(room: Room) -> None:
    room.tell(applied("old", url="http://10.0.0.1"), applied("new", url="http://10.0.0.1"))
    assert kept(room) == ({"new", "i"}, {"new", "i"})


def test_an_engine_of_another_pool_follows_nothing_and_is_kept_while_it_may_be_there() -> None:
    policies = {serial: (0, serial, 100.0) for serial in range(5)}
    idle = ReplicaState("evaluation", 1, True, "", 0.0, 100.0, "")
    assert gone({"e": idle}, policies, PATIENCE_S, lambda since: 100.0 + MUTE_S - since) == []
    assert served({"e": idle}, policies, 100.0 + MUTE_S, PATIENCE_S) == {1}
    assert gone({"e": idle}, policies, PATIENCE_S, lambda since: 100.0 + MUTE_S + GONE_S + 1 - since) == ["e"]


def test_a_dead_replica_keeps_no_version() -> None:
    policies = {serial: (0, serial, 100.0) for serial in range(5)}
    replicas = {
        "dead": ReplicaState("rollout", 1, True, "", 0.0, 50.0, ""),
        "i": ReplicaState("rollout", 4, True, "", 0.0, 100.0, ""),
    }
    assert served(replicas, policies, 150.0, PATIENCE_S) == {1, 4}
    assert served(replicas, policies, 161.0, PATIENCE_S) == {4}


def lagging(said: list[Any]) -> list[m.Alert]:
    return [one for one in said if isinstance(one, m.Alert) and one.name == "replica_lags"]


def test_thousands_that_die_at_once_are_one_alert_that_fits_the_bus_and_the_run_goes_on(room: Room) -> None:
    """As on preemptible machines: their names, joined, were once too large for the bus, in every scheduler that came."""
    room.tell(*[applied(f"etude-inference-7d9c5b8f6c-{number:05d}") for number in range(3000)])
    follow(room, 1)
    (alert,) = lagging(passing(room, PATIENCE_S + 5))
    assert "and 2992 more" in alert.what
    assert len(codec.encode(t.ALERTS, alert)[0]) < 4096
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config)  # the next scheduler
    room.tell()
    passing(room, PATIENCE_S + GONE_S + 5)
    assert kept(room) == ({"i"}, {"i"})


def test_of_each_that_lags_it_is_said_once_and_not_of_all_others_again(room: Room) -> None:
    room.tell(applied("first"), applied("second"))
    follow(room, 1)
    room.tell(applied("second", 1))
    (alert,) = lagging(passing(room, PATIENCE_S + 5))
    assert alert.examples == ["first"]
    follow(room, 2)
    (alert,) = lagging(passing(room, PATIENCE_S + 5))
    assert alert.examples == ["second"]


def test_an_attempt_that_is_asked_for_again_stands_on_what_the_rotation_serves(room: Room) -> None:
    room.tell(applied("dead"))
    follow(room, 1)
    passing(room, PATIENCE_S + 5)
    attempt = room.any()
    room.tell(m.RolloutFailed(run=RUN, key=room.key(attempt), reason="the sandbox died", worker="w"))
    again = [one for one in passing(room, 5) if isinstance(one, m.RolloutRequested) and one.key.attempt == attempt.id]
    assert [(one.key.epoch, one.policy_floor) for one in again] == [(1, 1)]


def beat(worker: str, *silent: str) -> m.AttemptHeartbeat:
    return m.AttemptHeartbeat(run=RUN, worker=worker, attempts={}, silent=list(silent))


def beating(room: Room, seconds: int, **workers: str) -> None:
    """`workers`: which replica each of them gets no answer from; "": none."""
    for _ in range(seconds):
        room.now += 1
        room.tell(*[beat(worker, *filter(None, [name])) for worker, name in workers.items()])


def test_one_that_answers_no_worker_leaves_when_a_version_has_waited_for_it_for_some_seconds(room: Room) -> None:
    room.tell(applied("dead"))
    follow(room, 1)
    beating(room, 3 * int(SILENT_S), w1="dead", w2="")
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"dead", "i"}  # a worker gets answers from it
    beating(room, 1, w1="dead", w2="dead")
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"i"}
    beating(room, 1, w1="", w2="dead")  # it was stopped, and goes on
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"dead", "i"}


def test_one_that_holds_nobody_up_stays_however_silent(room: Room) -> None:
    follow(room, 1)
    beating(room, 3 * int(SILENT_S), w1="i")
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"i"}
    follow(room, 2)
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"i"}


def test_what_a_worker_said_that_is_heard_of_no_more_counts_no_more(room: Room) -> None:
    room.tell(applied("dead"))
    follow(room, 1)
    beating(room, 2 * int(SILENT_S), gone="dead")
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"i"}
    passing(room, HEARD_S + 1)
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"dead", "i"}


def score_all(room: Room, version: int) -> None:
    """Every attempt that is asked for ends at once, until nothing more is asked for."""
    while asked := [a for a in room.ws.attempts.values() if a.state is AttemptState.requested]:
        room.tell(*[room.scored(room.key(attempt), oldest_version=version) for attempt in asked])


def test_who_keeps_the_gate_closed_is_named(room: Room) -> None:
    room.tell(applied("dead"))
    score_all(room, 0)
    # 9 groups are ready, of 3 a step: a tenth may be trained in step 4, within the bound of 2 if it is of step 1 or newer.
    trainer = "the version of step 1; the trainer has been in step 1 since 00:16:40 UTC"
    assert room.waits == {f"admitting 0: waiting for {trainer}"}
    numbers = {"version": 0, "oldest": 0, "accepted": 9, "running": 0, "held": 0, "lead": 6, "room": 0}
    assert room.ws.gate == numbers
    trained = list(room.ws.waiting)
    for step in (1, 2, 3):
        groups = dict.fromkeys(trained[3 * step - 3 : 3 * step], 0)
        room.tell(m.StepCommitted(run=RUN, incarnation=0, step=step, serial=step, groups=groups))
        follow(room, step)
    score_all(room, 3)
    assert room.waits == {"admitting 0: waiting for replica dead, at version 0, to take a newer version"}
    room.tell(applied("dead", 3))
    attempt = room.any()
    room.tell(m.AttemptClaimed(run=RUN, key=room.key(attempt), worker="w"))
    room.tell(m.AttemptHeartbeat(run=RUN, worker="w", attempts={attempt.id: (0, 1)}))
    score_all(room, 3)
    (waits,) = room.waits
    assert waits.startswith("admitting 0: waiting for the version of step ")
    assert f"for attempt {attempt.id}, which would be too old if others overtook it" in waits
