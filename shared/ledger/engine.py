"""How the ledger is opened: SQLite (WAL) or PostgreSQL (psycopg), the same for every caller.

Invariant: on PostgreSQL nobody holds a row for long without working on it. A writer that is frozen or cut off in the
middle of a transaction loses that transaction, so that its successor finds the lease free; and whoever waits for a row, or
for a server that went silent, is told so within seconds by a DBAPIError, which means: away, try again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url

from shared.settings import without_credentials
from shared.sqlite import write_ahead

CONNECT_S = 10  # an address where nobody answers must not hold a service for minutes
# A leader that stops between the check of its term and its commit holds the lease's row. All of these together with the
# lease itself (6 s) must stay below the 10 s in which a successor leads.
FROZEN_S = 4  # a transaction whose client says nothing for so long is rolled back
LOCKED_S = 3  # a statement waits for somebody else's row for so long
# Of the connection itself, by libpq's names: a server that went away without a word is noticed within about 9 s. Those that
# the address names are the address's.
ALIVE = {
    "connect_timeout": CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 2,
    "tcp_user_timeout": 8000,  # milliseconds without an acknowledgement of what was sent
}
BUSY_S = 30.0  # how long a SQLite writer waits for another one; transactions here take milliseconds


class LedgerMissing(FileNotFoundError):
    """There is no ledger at this address; the text says where it was looked for."""


def connect(url: str, *, read_only: bool = False) -> Engine:
    """`sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/NAME`.

    A writer's transaction takes SQLite's write lock at its beginning (BEGIN IMMEDIATE), so that it never fails half-way
    for want of it, and is on disk when it returns (synchronous=FULL). A read-only engine sees one snapshot per
    transaction and cannot write. Raises LedgerMissing for reading what is not there, ValueError for an address that
    names no ledger.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, read_only)
    if parsed.get_backend_name() == "postgresql":
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        isolation = "REPEATABLE READ" if read_only else "READ COMMITTED"
        engine = create_engine(
            parsed,
            pool_pre_ping=True,
            isolation_level=isolation,
            json_serializer=_to_json,
            connect_args={name: value for name, value in ALIVE.items() if name not in parsed.query},
        )
        event.listen(engine, "begin", _snapshot if read_only else _hurried)
        return engine
    raise ValueError(
        f"ledger: found {without_credentials(url)!r}; allowed: sqlite:///PATH, postgresql://USER:PASSWORD@HOST/NAME"
    )


def _snapshot(connection: Connection) -> None:
    """A reader holds nothing that another one waits for, and may think for as long as it likes."""
    connection.exec_driver_sql("SET TRANSACTION READ ONLY")


def _hurried(connection: Connection) -> None:
    """Said in every transaction and not when connecting: poolers hand neither settings nor start-up options on."""
    connection.exec_driver_sql(
        f"SELECT set_config('lock_timeout', '{LOCKED_S}s', true), "
        f"set_config('idle_in_transaction_session_timeout', '{FROZEN_S}s', true)"
    )


def unhurried(connection: Connection) -> None:
    """This transaction may wait for others, and think between its statements, for as long as it takes. For what must not
    be cut off: migrations, and reading a large run. Never for one that holds the lease."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
        connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _sqlite(url: URL, read_only: bool) -> Engine:
    if not url.database or url.database == ":memory:":
        raise ValueError(f"ledger: found {url}; the ledger must survive its process: name a file, sqlite:///PATH")
    path = Path(url.database)
    if read_only and not path.exists():
        raise LedgerMissing(f"{path}: no ledger here; start the services once, or name another with ETUDE_LEDGER")
    if not read_only:
        path.parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(
        url,
        # We say BEGIN ourselves: the driver's own idea of when a transaction starts leaves out SELECT and DDL.
        connect_args={"isolation_level": None, "timeout": BUSY_S},
        json_serializer=_to_json,
        json_deserializer=msgspec.json.decode,
    )

    def prepare(connection: Any, _: Any) -> None:
        if not read_only:
            write_ahead(connection, BUSY_S)
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        if read_only:
            cursor.execute("PRAGMA query_only=ON")
        cursor.close()

    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", begin)
    return engine
