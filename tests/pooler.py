"""A real PgBouncer before the real PostgreSQL (tests/servers.py), for tests that reach the ledger through a pooler."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, make_url

from infra.servers import pgbouncer
from tests import missing, servers


@contextmanager
def pooled(folder: Path, mode: str = "transaction", **options: str) -> Iterator[str]:
    """Give the address of an empty ledger through a pooler in this mode: a database of its own, dropped afterwards. (A schema
    of its own would have to be named at start-up, which poolers do not hand on.)"""
    direct = servers.need("ETUDE_LEDGER")["ETUDE_LEDGER"]
    binary = _program()
    database = f"test_{secrets.token_hex(6)}"
    admin = create_engine(make_url(direct).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {database}")
    try:
        with pgbouncer.pooling(binary, direct, folder, mode, **options) as url:
            yield f"{url.rpartition('/')[0]}/{database}"
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {database} WITH (FORCE)")
        admin.dispose()


def _program() -> Path:
    """`make servers` fetches it. Where it cannot be had the test skips: not every system has a package."""
    return pgbouncer.here() or missing.skip(["PgBouncer"], servers.COMMAND)
