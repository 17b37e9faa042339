"""One scheduler writes at a time; the lease passes on when its holder leaves, dies or falls silent."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, OperationalError

from services.scheduler.desk import Desk
from services.scheduler.leadership import Leadership
from services.scheduler.store import Fenced, Store
from shared.process import identity
from tests.patience import patient, until
from tests.unit.scheduler.ledgers import opened
from tests.unit.scheduler.world import RUN, World, config


def elsewhere(engine: Engine) -> None:
    """The holder is on another machine: only its silence can tell that it is gone."""
    with engine.begin() as connection:
        holder = json.loads(connection.execute(text("SELECT holder FROM lease")).scalar_one())
        connection.execute(text("UPDATE lease SET holder = :h"), {"h": json.dumps({**holder, "host": "another"})})


def test_the_first_leads_and_the_second_waits_until_the_first_leaves(any_engine: Engine) -> None:
    first, second = (Leadership(any_engine, 60, name) for name in ("first", "second"))
    assert first.try_lead() == 1
    assert second.try_lead() is None
    assert second.holder().startswith("first (process ")
    first.renew()
    first.leave()
    assert second.try_lead() == 2
    first.term = 1
    with pytest.raises(Fenced, match="second"):
        first.renew()


def test_a_holder_that_does_not_renew_is_replaced_and_one_that_does_is_not(any_engine: Engine) -> None:
    first, second = Leadership(any_engine, 0.3, "first"), Leadership(any_engine, 0.3, "second")
    first.try_lead()
    elsewhere(any_engine)
    for _ in range(4):
        assert second.try_lead() is None
        time.sleep(0.1)
        first.renew()
    assert second.try_lead() is None
    assert until(second.try_lead, "the term of the second") == 2


@pytest.mark.parametrize("when", ["within a batch", "after a batch"])
def test_a_holder_that_falls_silent_with_the_lease_locked_is_replaced(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own clock over silent transactions does not run within psycopg's executemany, nor after it."""
    monkeypatch.setattr("shared.ledger.engine.FROZEN_S", 1)
    with opened("postgresql", tmp_path) as engine:
        first, second = Leadership(engine, 0.3, "first"), Leadership(engine, 0.3, "second")
        first.try_lead()
        elsewhere(engine)
        reader = engine.connect()  # as a backup in its transaction
        reader.execute(text("SELECT term FROM lease"))
        reader.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
        silent = engine.connect()
        silent.execute(text("CREATE TEMP TABLE written (number int)"))
        silent.execute(text("SELECT term FROM lease FOR SHARE"))
        if when == "within a batch":  # what psycopg has sent when its process stops in the middle
            batch = silent.connection.dbapi_connection.pgconn
            batch.enter_pipeline_mode()
            batch.send_query_params(b"INSERT INTO written VALUES (1)", None)
            batch.send_flush_request()
            batch.flush()
        else:
            silent.execute(text("INSERT INTO written VALUES (:number)"), [{"number": 1}, {"number": 2}])
        ends = time.monotonic() + patient(60)
        term = None
        while term is None and time.monotonic() < ends:
            with contextlib.suppress(OperationalError):  # the row is locked
                term = second.try_lead()
            time.sleep(0.1)
        assert term == 2
        with pytest.raises(DBAPIError):
            silent.execute(text("SELECT 1"))
        silent.invalidate()
        silent.close()
        assert reader.execute(text("SELECT 1")).scalar_one() == 1
        reader.close()


def test_a_holder_whose_process_is_gone_is_replaced_at_once(any_engine: Engine) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    process = msgspec.to_builtins(identity(dead.pid))
    first, second = Leadership(any_engine, 60, "first"), Leadership(any_engine, 60, "second")
    first._holder = json.dumps({**json.loads(first._holder), "pid": dead.pid, "process": process})
    first.try_lead()
    dead.wait()
    assert second.try_lead() == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"process": {"boot": "another", "namespace": "n", "pid": 2**22 + 1, "ticks": 1}},  # a machine of the same name
        {
            "process": {**msgspec.to_builtins(identity(os.getpid())), "namespace": "pid:[1]", "pid": 2**22 + 1}
        },  # a container
        {"process": None, "pid": 2**22 + 1, "started": 1.0},  # an older version's word
    ],
)
def test_a_holder_that_cannot_be_seen_is_not_taken_for_dead(any_engine: Engine, changed: dict[str, Any]) -> None:
    first, second = Leadership(any_engine, 60, "first"), Leadership(any_engine, 60, "second")
    first._holder = json.dumps({**json.loads(first._holder), **changed})
    first.try_lead()
    assert second.try_lead() is None
    assert second.holder().startswith("first (process ")


def test_a_step_of_the_clock_does_not_end_a_term(any_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Leadership(any_engine, 60, "first"), Leadership(any_engine, 60, "second")
    first.try_lead()
    began = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: began(process) + 3600)
    assert second.try_lead() is None


def test_a_scheduler_that_was_replaced_writes_nothing_more(any_engine: Engine) -> None:
    old = Leadership(any_engine, 60, "old")
    world = World(any_engine, config(max_steps=6))
    world.desk = Desk(Store(any_engine), lambda ref: world.run_config, term=old.try_lead())
    world.start()
    for _ in range(6):
        world.tick()
    frozen = world.desk
    old.leave()
    world.desk = Desk(
        Store(any_engine), lambda ref: world.run_config, term=Leadership(any_engine, 60, "new").try_lead()
    )
    world.schedule()
    with any_engine.begin() as connection:
        before = connection.execute(text("SELECT count(*), max(sequence) FROM events")).one()
    with pytest.raises(Fenced, match="term 1 is over"):
        frozen.handle(list(world.inbox), world.now + 1, {RUN: 10**6})
    with any_engine.begin() as connection:
        assert connection.execute(text("SELECT count(*), max(sequence) FROM events")).one() == before
    world.run_until("finished")
    assert world.step == 6
