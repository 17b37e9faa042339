"""A ledger that is away at the wrong moment neither ends the scheduler nor keeps it from ending."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from services.scheduler import measures, service
from services.scheduler.config import SchedulerConfig
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.telemetry import Health
from tests.unit.scheduler.ledgers import ledger_url
from tests.unit.scheduler.test_scheduler_processes import Scheduler, no_orphans, others, until
from tests.unit.scheduler.world import config

__all__ = ["no_orphans"]


@pytest.fixture
def platform_stores() -> None:
    """`no_orphans` wants to know; here every test names its own ledger."""


@pytest.mark.parametrize("leads", [True, False], ids=["leads", "waits"])
def test_a_scheduler_that_is_told_to_stop_ends_although_the_ledger_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    with ledger_url("postgresql", tmp_path) as url:
        monkeypatch.setenv("ETUDE_LEDGER", url)
        schema = str(make_url(url).query["options"]).partition("=")[2]
        admin = create_engine(make_url(url), isolation_level="AUTOCOMMIT")

        async def story() -> None:
            async with others(tmp_path, config(max_steps=300)) as peers:
                scheduler = Scheduler(tmp_path, "scheduler")
                await until(lambda: peers.step >= 1, "first step")
                if not leads:
                    scheduler = Scheduler(tmp_path, "second")
                    await until(lambda: any("its turn" in wait for wait in scheduler.waits()), "waiting scheduler")
                with admin.connect() as connection:
                    connection.exec_driver_sql(f"ALTER SCHEMA {schema} RENAME TO {schema}_away")
                try:
                    await until(
                        lambda: any("ledger" in wait for wait in scheduler.waits()), "scheduler without a ledger"
                    )
                    assert await asyncio.to_thread(scheduler.stop) == 0
                finally:
                    with admin.connect() as connection:
                        connection.exec_driver_sql(f"ALTER SCHEMA {schema}_away RENAME TO {schema}")

        try:
            asyncio.run(story())
        finally:
            admin.dispose()


def test_a_ledger_that_is_away_at_pruning_does_not_end_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PRUNE_EVERY_S", 0.0)
    monkeypatch.setattr(service, "KEEP_MESSAGES_S", -60.0)
    settings = SchedulerConfig(state=tmp_path, batch_linger_s=0.02)
    engine = ledger.connect(settings.ledger_url)
    ledger.upgrade(engine)
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TRIGGER away BEFORE DELETE ON outbox BEGIN SELECT RAISE(ABORT, 'the disk is full'); END")
        )

    async def story() -> None:
        stop = asyncio.Event()
        bus = buses.connect(settings.bus_url, client="scheduler")
        async with others(tmp_path, config(max_steps=3)) as peers, Health("scheduler", settings) as health:
            objects = stores.connect(settings.objects_url)
            serving = asyncio.create_task(service.serve(settings, engine, bus, objects, health, stop))
            await until(lambda: "finished" in peers.states or serving.done(), "end of the run")
            assert not serving.done()
            stop.set()
            await serving
        await bus.close()

    try:
        asyncio.run(story())
        with engine.begin() as connection:
            assert connection.execute(text("SELECT count(*) FROM outbox WHERE published_at IS NOT NULL")).scalar()
    finally:
        engine.dispose()


def test_who_leads_no_more_counts_no_groups_beside_the_one_who_does(tmp_path: Path) -> None:
    settings = SchedulerConfig(state=tmp_path, batch_linger_s=0.02, leadership_s=60)
    engine = ledger.connect(settings.ledger_url)
    ledger.upgrade(engine)

    def samples() -> list[int]:
        gauges = (measures.GROUPS, measures.ATTEMPTS, measures.GATE)
        return [sum(len(metric.samples) for metric in gauge.collect()) for gauge in gauges]

    async def story() -> None:
        stop = asyncio.Event()
        bus = buses.connect(settings.bus_url, client="scheduler")
        async with others(tmp_path, config(max_steps=1000)), Health("scheduler", settings) as health:
            objects = stores.connect(settings.objects_url)
            serving = asyncio.create_task(service.serve(settings, engine, bus, objects, health, stop))
            await until(lambda: all(samples()) or serving.done(), "a run")
            with engine.begin() as connection:
                holder = '{"name": "another", "host": "elsewhere", "pid": 1}'
                connection.execute(text("UPDATE lease SET term = term + 1, holder = :holder"), {"holder": holder})
            await until(lambda: any("another" in what for what in health._waits) or serving.done(), "its successor")
            assert samples() == [0, 0, 0]
            stop.set()
            await serving
        await bus.close()

    try:
        asyncio.run(story())
    finally:
        engine.dispose()
