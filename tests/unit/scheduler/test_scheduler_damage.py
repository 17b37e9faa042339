"""A version that replicas cannot read: who goes on with what, when the trainer is told to publish it again, and how often."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from services.scheduler.desk import Desk
from services.scheduler.records import FIRST_AGAIN_S
from services.scheduler.store import Store
from shared.contracts import messages as m
from shared.ledger.transitions import AttemptState
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.test_scheduler_replicas import PATIENCE_S, applied, passing
from tests.unit.scheduler.world import REF, RUN

FOUND = "serial 1: payload: checksum a0, expected c2"


@pytest.fixture
def room(engine: Engine) -> Room:
    """Two replicas, "i" and "j", serve version 0; version 1, a delta, is published."""
    room = Room(engine).begin()
    room.tell(applied("i"), applied("j"), published(1, parent=0))
    return room


def published(serial: int, parent: int = -1) -> m.PolicyPublished:
    return m.PolicyPublished(run=RUN, serial=serial, incarnation=0, step=1, parent=parent, manifest=REF)


def damaged(name: str, serial: int = 1, serving: int = 0, **more: Any) -> m.PolicyApplied:
    said = {"ok": False, "damaged": True, "reason": FOUND, **more}
    return applied(name, serial, serving=serving, **said)


def told(said: list[Any]) -> list[int]:
    """Versions that the trainer is told to publish again."""
    return [one.damaged for one in said if isinstance(one, m.RunStatus) and one.damaged >= 0]


def alerts(said: list[Any]) -> list[tuple[str, str]]:
    return [(one.severity, one.what) for one in said if isinstance(one, m.Alert) and one.name == "version_damaged"]


def test_when_the_last_replica_in_rotation_reports_a_version_the_trainer_is_told_once_and_the_alert_says_why(
    room: Room,
) -> None:
    room.tell(damaged("i"))
    assert told(room.said) == []
    assert [severity for severity, _ in alerts(room.said)] == ["warning"]
    room.tell(damaged("j"))
    assert told(room.said) == [1]
    ((severity, what),) = alerts(room.said)
    assert severity == "critical"
    assert "version 1 is damaged or lost" in what
    (status,) = [one for one in room.said if isinstance(one, m.RunStatus)]
    assert (status.state, status.configs) == ("running", [REF])
    assert f"the trainer to publish version 1 again: {FOUND}" in room.waits
    assert told(passing(room, 20)) == []


def test_until_then_replicas_are_asked_with_what_they_hold_within_the_bound(room: Room) -> None:
    room.tell(damaged("i"), damaged("j"))
    assert {name: one.serial for name, one in room.ws.rotation(room.now, PATIENCE_S).items()} == {"i": 0, "j": 0}
    while asked := [a for a in room.ws.attempts.values() if a.state is AttemptState.requested]:
        assert {attempt.policy_floor for attempt in asked} == {0}
        room.tell(*[room.scored(room.key(attempt)) for attempt in asked])  # and nothing is trained
    schedule = room.run_config.schedule
    assert len(room.ws.waiting) == (schedule.max_staleness + 1) * schedule.groups_per_step  # then the gate is closed


def test_with_the_new_base_all_is_as_before(room: Room) -> None:
    room.tell(damaged("i"), damaged("j"))
    room.tell(published(2))
    assert told(room.said) == []
    assert not any("again" in what for what in room.waits)
    room.tell(applied("i", 2))
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"i"}  # j stands by, and holds nobody up
    room.tell(applied("j", 2))
    assert {one.serial for one in room.ws.rotation(room.now, PATIENCE_S).values()} == {2}
    assert told(passing(room, 20)) == []


def test_a_replica_that_joins_and_cannot_read_the_chain_stops_nobody(room: Room) -> None:
    room.tell(applied("i", 1), applied("j", 1), damaged("new", serving=-1))
    assert told(room.said) == []
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"i", "j"}
    ((severity, what),) = alerts(room.said)
    assert severity == "warning"
    assert "new" in what


def test_one_that_died_before_it_could_report_is_not_waited_for_longer_than_its_patience(room: Room) -> None:
    room.tell(damaged("i"))
    assert told(passing(room, PATIENCE_S - 5)) == []
    assert told(passing(room, 10)) == [1]


def test_what_was_reported_before_the_newest_base_says_nothing(room: Room) -> None:
    room.tell(damaged("i"), published(2), damaged("j"))
    assert told(room.said) == []
    assert not any("again" in what for what in room.waits)


def test_one_that_cannot_load_it_for_reasons_of_its_own_stands_by_and_no_base_is_asked_for(room: Room) -> None:
    full = {"damaged": False, "reason": "No space left on device"}
    room.tell(damaged("i", **full), damaged("j", **full))
    assert (told(passing(room, 5)), alerts(room.said)) == ([], [])
    assert set(room.ws.rotation(room.now, PATIENCE_S)) == {"i", "j"}


def test_a_scheduler_that_takes_over_knows_what_was_reported(room: Room) -> None:
    room.tell(damaged("i"), damaged("j"))
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
    room.tell()
    assert told(room.said) == [1]  # the one before may have died before it said so; a trainer obeys once
    assert {one.serial for one in room.ws.rotation(room.now, PATIENCE_S).values()} == {0}
    assert alerts(room.said) == []


def test_a_base_that_cannot_be_read_either_is_not_followed_by_another_at_once(room: Room) -> None:
    room.tell(damaged("i"), damaged("j"))
    room.tell(published(2), damaged("i", 2), damaged("j", 2))
    assert told(room.said) == []
    assert told(passing(room, FIRST_AGAIN_S + 1)) == [2]
    room.tell(published(3), damaged("i", 3), damaged("j", 3))
    assert told(passing(room, FIRST_AGAIN_S + 1)) == []
    assert told(passing(room, FIRST_AGAIN_S)) == [3]
    room.tell(published(4), applied("i", 4), applied("j", 4))
    room.tell(published(5, parent=4), damaged("i", 5, serving=4), damaged("j", 5, serving=4))
    assert told(room.said) == [5]  # another damage, after all was well


def test_a_paused_run_is_mended_and_stays_paused(room: Room) -> None:
    room.tell(m.RunCommand(run=RUN, action="pause", by="ann"))
    room.tell(damaged("i"), damaged("j"))
    (status,) = [one for one in room.said if isinstance(one, m.RunStatus)]
    assert (status.state, status.damaged) == ("paused", 1)
