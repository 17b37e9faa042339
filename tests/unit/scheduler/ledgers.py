"""Real ledgers for tests: SQLite always, PostgreSQL where ETUDE_TEST_POSTGRES names one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url

from shared import ledger

KINDS = ("sqlite", "postgresql")


@contextlib.contextmanager
def ledger_url(kind: str, folder: Path) -> Iterator[str]:
    """The address of an empty ledger. PostgreSQL: a schema of its own, dropped afterwards."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'ledger.db'}"
        return
    server = os.environ.get("ETUDE_TEST_POSTGRES")
    if not server:
        pytest.skip("ETUDE_TEST_POSTGRES is not set: no PostgreSQL to test against (postgresql://USER@HOST/DATABASE)")
    schema = f"test_{secrets.token_hex(6)}"
    url = make_url(server).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    try:
        yield url.update_query_dict({"options": f"-csearch_path={schema}"}).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")
        admin.dispose()


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
