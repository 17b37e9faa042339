"""The scheduler's gauges name the runs in memory and no others."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine

from services.scheduler import measures
from services.scheduler.desk import KEEP_FINISHED_S
from shared.contracts import messages as m
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.world import REF, RUN


def runs(gauge: Any) -> set[str]:
    return {sample.labels["run"] for metric in gauge.collect() for sample in metric.samples}


def test_a_finished_run_has_no_gauges_once_the_scheduler_lets_it_go(engine: Engine) -> None:
    gauges = (measures.GROUPS, measures.ATTEMPTS, measures.GATE)
    room = Room(engine).begin()
    room.tell(m.PolicyPublished(run="other", serial=0, incarnation=0, step=0, parent=-1, manifest=REF))
    measured = measures.measure(room.desk.sets, set())
    assert measured == {RUN, "other"}
    assert all(RUN in runs(gauge) for gauge in gauges)
    room.tell(m.RunCommand(run=RUN, action="stop"))
    room.now += KEEP_FINISHED_S + 1
    room.tell()
    assert RUN not in room.desk.sets
    measured = measures.measure(room.desk.sets, measured)
    assert measured == {"other"}
    assert not any(RUN in runs(gauge) for gauge in gauges)
    assert "other" in runs(measures.GROUPS)
    measures.measure({}, measured)
    assert not any(runs(gauge) & {RUN, "other"} for gauge in gauges)
