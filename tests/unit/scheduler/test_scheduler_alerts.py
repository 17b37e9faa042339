"""Whoever raises an alert, Prometheus hears of it from the scheduler; and how often it is said."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from sqlalchemy import Engine

from services.scheduler.audit import audit
from services.scheduler.desk import Desk
from services.scheduler.records import Head
from services.scheduler.store import Store
from services.scheduler.working_set import AGAIN_S, WorkingSet
from shared.bus.gone import Gone
from shared.bus.gone import alert as gone_alert
from shared.contracts import codec
from shared.contracts import topics as t
from shared.contracts.messages import Alert, StepCommitted
from tests.unit.etude.test_run_commands import A, folder
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import RUN


def counted(name: str, severity: str) -> float | None:
    labels = {"run": A, "name": name, "severity": severity}
    return REGISTRY.get_sample_value("etude_scheduler_alerts_total", labels)


def test_an_alert_of_any_service_is_counted_by_run_name_and_severity(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with folder(tmp_path) as here:
            await here.start(A)
            for name, severity in (("fewer_solved", "warning"), ("age_bound_breached", "critical")) * 2:
                await here.say(t.ALERTS, Alert(run=A, name=name, severity=severity, what=name))  # type: ignore[arg-type]
            for _ in range(600):
                found = (counted("fewer_solved", "warning"), counted("age_bound_breached", "critical"))
                if found == (2, 2):
                    return
                await asyncio.sleep(0.05)
            raise AssertionError(found)

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.fixture
def room(engine: Engine) -> Room:
    return Room(engine).begin()


def trained(room: Room, step: int, *groups: str) -> list[Alert]:
    room.now += 1
    room.tell(StepCommitted(run=RUN, incarnation=0, step=step, serial=step, groups=dict.fromkeys(groups, 0)))
    return [said for said in room.said if isinstance(said, Alert)]


def test_a_critical_alert_about_other_groups_is_another_alert(room: Room) -> None:
    (first,) = trained(room, 1, "g-a")
    (second,) = trained(room, 2, "g-b")
    assert (first.name, second.name) == ("unknown_groups", "unknown_groups")
    assert (first.examples, second.examples) == (["g-a"], ["g-b"])


def test_the_same_alert_is_said_again_after_a_while_and_not_before(room: Room) -> None:
    assert len(trained(room, 1, "g-a")) == 1
    assert trained(room, 2, "g-a") == []
    room.now += AGAIN_S
    assert [alert.name for alert in trained(room, 3, "g-a")].count("unknown_groups") == 1


def test_the_next_scheduler_does_not_repeat_what_the_last_one_has_just_said(room: Room) -> None:
    assert len(trained(room, 1, "g-a")) == 1
    room.desk = Desk(Store(room.engine), lambda ref: room.run_config)
    assert trained(room, 2, "g-a") == []


def test_whatever_is_put_into_an_alert_it_fits_the_bus() -> None:
    ws = WorkingSet(Head(run_id=RUN))
    ws.alert(1.0, "configuration", "critical", "\0" * 100_000, ["\0" * 100_000] * 100)
    codec.encode(t.ALERTS, ws.changes.outbox[0].message)


def test_that_records_are_gone_is_kept_once_in_every_open_run_and_the_audit_knows(room: Room) -> None:
    assert audit(room.engine, RUN, max_staleness=2).number("retention") == 0
    said = gone_alert("reward", [Gone("rollouts.finished", 3, first=0, last=34, count=35)])
    room.tell(said, offset=70)
    room.tell(said, offset=70)  # delivered again
    report = audit(room.engine, RUN, max_staleness=2)
    (found,) = [finding for finding in report.findings if finding.check == "retention"]
    assert found.rows == ["rollouts.finished/3: 35 records, offsets 0 to 34"]
    assert not report.sound
    assert room.ws.head.state == "running"
