"""One attempt's whole life can be read, in order, down to the step that trained it."""

from __future__ import annotations

import itertools
from pathlib import Path

from sqlalchemy import Engine
from typer.testing import CliRunner

from services.scheduler.cli import app
from services.scheduler.trace import life, runs_of
from shared import ledger
from tests.unit.scheduler.world import RUN, World, config


def test_a_trained_attempt_is_followed_from_request_to_step(any_engine: Engine) -> None:
    world = World(any_engine, config(max_steps=2))
    world.start()
    world.run_until("finished")
    with any_engine.begin() as connection:
        attempt = connection.exec_driver_sql(
            "SELECT min(a.attempt_id) FROM attempts a JOIN trained t ON a.group_id = t.group_id"
        ).scalar()
        assert runs_of(connection, attempt) == [RUN]
        moments = life(connection, RUN, attempt)
        assert life(connection, RUN, "nobody") == []
    kinds = [moment.kind for moment in moments]
    wanted = [
        "attempt.requested",
        "attempt.finished",
        "attempt.scored",
        "group.ready",
        "group.announced",
        "step.committed",
    ]
    assert [kind for kind in kinds if kind in wanted] == wanted
    assert [m.sequence for m in moments] == sorted(m.sequence for m in moments)
    assert all(a.at <= b.at for a, b in itertools.pairwise(moments))


def test_an_attempt_that_nobody_knows_is_told(tmp_path: Path) -> None:
    engine = ledger.connect(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.upgrade(engine)
    engine.dispose()
    done = CliRunner().invoke(app, ["trace", "a-none", "--state", str(tmp_path)])
    assert done.exit_code == 2
    assert "not in this ledger" in done.output
