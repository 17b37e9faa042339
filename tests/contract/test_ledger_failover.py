"""A failover of PostgreSQL leaves sessions with the old primary, which only reads: they are thrown away, and the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from services.scheduler import service
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership import Leadership
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.ledger.models import LeaseRow
from shared.telemetry import Health
from tests.patience import eventually
from tests.unit.scheduler.ledgers import opened
from tests.unit.scheduler.test_scheduler_intake import Room
from tests.unit.scheduler.test_scheduler_processes import others
from tests.unit.scheduler.world import RUN, config

ONLY_READS = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with opened("postgresql", tmp_path) as engine:
        yield engine


def fail_over(engine: Engine, sessions: int = 3) -> None:
    """All sessions of the pool can only read from now on; a new one can write."""
    with contextlib.ExitStack() as stack:
        for connection in [stack.enter_context(engine.connect()) for _ in range(sessions)]:
            connection.exec_driver_sql(ONLY_READS)
            connection.commit()


def test_the_second_transaction_writes(engine: Engine) -> None:
    leadership = Leadership(engine, 6.0, "scheduler")
    assert leadership.try_lead() == 1
    fail_over(engine)
    with pytest.raises(DBAPIError, match="read-only") as refused:
        leadership.renew()
    assert refused.value.connection_invalidated
    for _ in range(5):
        leadership.renew()
    assert leadership.holder().startswith("scheduler")


def test_a_session_whose_server_ended_it_is_not_used_again(engine: Engine) -> None:
    leadership = Leadership(engine, 6.0, "scheduler")
    assert leadership.try_lead() == 1
    with engine.connect() as mine, engine.connect() as other:
        pid = mine.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        mine.rollback()
        other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
    for _ in range(3):
        leadership.renew()


def test_a_reader_goes_on_where_it_can_only_read(engine: Engine) -> None:
    url = engine.url.render_as_string(hide_password=False)
    reader = ledger.connect(url, read_only=True)
    fail_over(reader)
    with reader.begin() as connection:
        assert connection.execute(text(f"SELECT count(*) FROM {LeaseRow.__tablename__}")).scalar() == 0
    reader.dispose()


def test_a_reader_leaves_a_session_whose_server_only_reads_since_a_failover(engine: Engine) -> None:
    """No read of it fails: housekeeping would delete by the record of a server that hears of nothing any more."""
    reader = ledger.connect(engine.url.render_as_string(hide_password=False), read_only=True)

    def session() -> int:
        with reader.begin() as connection:
            return int(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())

    before = session()
    assert session() == before
    fail_over(reader, sessions=1)
    after = session()
    assert after != before
    assert session() == after
    reader.dispose()


def test_a_reader_of_a_standby_keeps_its_session(engine: Engine) -> None:
    url = engine.url.update_query_dict({"options": f"{engine.url.query['options']} -cdefault_transaction_read_only=on"})
    reader = ledger.connect(url.render_as_string(hide_password=False), read_only=True)
    pids = set()
    for _ in range(3):
        with reader.begin() as connection:
            pids.add(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar())
    assert len(pids) == 1
    reader.dispose()


def test_who_looks_before_the_start_refuses_a_server_that_only_reads(engine: Engine) -> None:
    """The doctor and the front door, which would else be green while no run can begin."""
    options = f"{engine.url.query['options']} -cdefault_transaction_read_only=on"
    standby = ledger.connect(engine.url.update_query_dict({"options": options}).render_as_string(hide_password=False))
    with pytest.raises(ledger.LedgerUnavailable, match=r"only reads.*Way out: name the primary"):
        ledger.reach(standby)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    with pytest.raises(ledger.LedgerUnavailable, match=r"only reads.*Way out: name the primary"):
        ledger.upgrade(standby)
    standby.dispose()


def test_the_desk_takes_the_same_batch_again(engine: Engine) -> None:
    room = Room(engine).begin()
    fail_over(engine)
    room.now += 10
    with pytest.raises(DBAPIError):
        room.tell()
    assert room.tell() == []
    assert RUN in room.desk.sets


def test_a_run_goes_on_and_its_scheduler_has_said_why_it_stood(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETUDE_LEDGER", engine.url.render_as_string(hide_password=False))
    settings = SchedulerConfig(state=tmp_path, batch_linger_s=0.02)
    said: list[str] = []
    waits_on = Health.wait_on
    monkeypatch.setattr(Health, "wait_on", lambda self, what: said.append(what) or waits_on(self, what))

    async def story() -> None:
        stop = asyncio.Event()
        bus = buses.connect(settings.bus_url, client="scheduler")
        async with others(tmp_path, config(max_steps=6)) as peers, Health("scheduler", settings) as health:
            objects = stores.connect(settings.objects_url)
            serving = asyncio.create_task(service.serve(settings, engine, bus, objects, health, stop))
            await eventually(lambda: peers.step >= 1 or serving.done(), "the first step")
            await asyncio.to_thread(fail_over, engine)
            await eventually(lambda: "finished" in peers.states or serving.done(), "the end of the run")
            assert not serving.done()
            assert not any("ledger" in wait for wait in health._waits)
            stop.set()
            await serving
        await bus.close()

    asyncio.run(story())
    assert any(wait.startswith("the ledger: ") and "read-only transaction" in wait for wait in said)
