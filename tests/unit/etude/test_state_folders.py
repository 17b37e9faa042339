"""A state folder keeps all of its data below itself, whatever its name."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from etude.evaluate import stores_of
from etude.hearing import embedded, silent
from services.reward.jobs import celery_app
from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.contracts.messages import RunCommand
from shared.contracts.topics import RUNS_COMMANDS
from shared.settings import ServiceSettings, path_and_options

NAMES = ["p%41c", "q?x=1", "100% ü", "a b#c", 'it\'s "x"@b:c', "a?synchronous=full"]


def files(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("name", NAMES)
def test_every_embedded_store_lies_in_the_state_folder(tmp_path: Path, name: str) -> None:
    state = tmp_path / name
    settings = ServiceSettings(state=state)

    async def bus() -> None:
        bus = buses.connect(settings.bus_url, client="t")
        await bus.publish(RUNS_COMMANDS, "r", RunCommand(run="r", action="pause"))
        await bus.close()

    assert silent(settings)
    asyncio.run(bus())
    assert (embedded(settings), silent(settings)) == (state / "bus.db", False)
    stores.connect(settings.objects_url).put("a/b", b"1")
    with (engine := ledger.connect(settings.ledger_url)).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (x)")
    engine.dispose()
    with celery_app(settings.jobs_url) as app:
        app.send_task("t")
    assert files(tmp_path) == {name}
    assert {"bus.db", "objects", "ledger.db", "jobs.db"} <= files(state)
    with sqlite3.connect(state / "jobs.db") as jobs:
        assert jobs.execute("select count(*) from kombu_message").fetchone() == (1,)
    urls = stores_of(state)
    assert urls == {
        "ETUDE_BUS": settings.bus_url,
        "ETUDE_OBJECTS": settings.objects_url,
        "ETUDE_JOBS": settings.jobs_url,
    }


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("a/b.db", ("a/b.db", "")),
        ("a/b.db?synchronous=full", ("a/b.db", "synchronous=full")),
        ("q?x=1/b.db", ("q?x=1/b.db", "")),
        ("q?x=1/b.db?synchronous=full", ("q?x=1/b.db", "synchronous=full")),
        ("b?x=1", ("b", "x=1")),
    ],
)
def test_a_question_mark_before_a_slash_is_part_of_a_path(address: str, parts: tuple[str, str]) -> None:
    assert path_and_options(address) == parts


def test_an_option_that_no_store_knows_is_refused_still() -> None:
    with pytest.raises(ValueError, match="allowed: synchronous=full"):
        buses.connect("sqlite:b?x=1", client="t")
    with pytest.raises(ValueError, match="allowed: file:PATH"):
        stores.connect("file:o?x=1")
