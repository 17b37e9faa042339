"""Real ledgers for tests: SQLite always, PostgreSQL where one runs (tests/servers.py), PgBouncer before it where asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import Engine, text

from shared import ledger
from tests.pooler import pooled
from tests.servers import need, own_schema

KINDS = ("sqlite", "postgresql")
ALL = (*KINDS, "pooled")  # PostgreSQL through PgBouncer in transaction mode


@contextlib.contextmanager
def ledger_url(kind: str, folder: Path) -> Iterator[str]:
    """The address of an empty ledger. PostgreSQL: a schema of its own, dropped afterwards."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'ledger.db'}"
        return
    if kind == "pooled":
        with pooled(folder) as url:
            yield url
        return
    with own_schema(need("ETUDE_LEDGER")["ETUDE_LEDGER"]) as url:
        yield url


@contextlib.contextmanager
def opened(kind: str, folder: Path) -> Iterator[Engine]:
    """An empty ledger with its tables."""
    with ledger_url(kind, folder) as url:
        engine = ledger.connect(url)
        try:
            ledger.upgrade(engine)
            yield engine
        finally:
            engine.dispose()


GUARDS = {
    "sqlite": "SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'guard%'",
    "postgresql": "SELECT tgname, relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid "
    "WHERE tgname LIKE 'guard%' AND relnamespace = current_schema()::regnamespace",
}


def unguarded(engine: Engine) -> None:
    """For tests that damage a ledger: nothing refuses it any more."""
    with engine.begin() as connection:
        for name, table in connection.execute(text(GUARDS[engine.dialect.name])).all():
            on = f" ON {table}" if engine.dialect.name == "postgresql" else ""
            connection.exec_driver_sql(f"DROP TRIGGER {name}{on}")
        if engine.dialect.name == "postgresql":
            connection.exec_driver_sql("DROP FUNCTION IF EXISTS guard_refuse")
