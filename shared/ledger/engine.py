"""How the ledger is opened: SQLite (WAL) or PostgreSQL (psycopg), the same for every caller.

Invariant: on PostgreSQL nobody holds a row for long without working on it. A writer that is frozen or cut off in the
middle of a transaction loses that transaction: the server ends it, or the scheduler that takes over the lease does
(`end_silent`). A writer that waits for a row, or for a server that went silent, gets a DBAPIError within seconds and should
retry. Nothing outlives its transaction but rows, so that a pooler in transaction mode may stand in between (`addresses`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, ExceptionContext, create_engine, event, make_url, text
from sqlalchemy.exc import InvalidatePoolError

from shared import storable
from shared.ledger import addresses, rights
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
ONLY_READS = "only_reads"  # in what the pool remembers of a session
READ_ONLY = "25006"  # SQLSTATE: a write in a read-only transaction
_END_SILENT = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE (state LIKE 'idle in transaction%' OR state = 'active' AND wait_event = 'ClientRead') "
    "AND clock_timestamp() - state_change > make_interval(secs => :seconds) AND pid <> pg_backend_pid() "
    "AND pid IN (SELECT pid FROM pg_locks WHERE relation = to_regclass(:table) AND granted AND mode <> 'AccessShareLock' "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
)
BUSY_S = 30.0  # how long a SQLite writer waits for another one; transactions here take milliseconds


class LedgerMissing(FileNotFoundError):
    """There is no ledger at this address; the text says where it was looked for."""


def connect(url: str, *, read_only: bool = False) -> Engine:
    """`sqlite:///PATH` or `postgresql://USER:PASSWORD@HOST/NAME`.

    A writer's transaction takes SQLite's write lock at its beginning (BEGIN IMMEDIATE), so that it never fails half-way
    for want of it, and is on disk when it returns (synchronous=FULL). A read-only engine sees one snapshot per
    transaction and cannot write. Raises LedgerMissing for reading what is not there, ValueError for an address that
    names no ledger or a parameter that PostgreSQL does not know.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed, read_only)
    if parsed.get_backend_name() == "postgresql":
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        addresses.require_known(parsed)
        isolation = "REPEATABLE READ" if read_only else "READ COMMITTED"
        engine = create_engine(
            parsed,
            pool_pre_ping=True,
            isolation_level=isolation,
            json_serializer=_to_json,
            connect_args={n: v for n, v in ALIVE.items() if n not in parsed.query} | addresses.NEVER_PREPARED,
        )
        event.listen(engine, "begin", _snapshot if read_only else _hurried)
        if read_only:
            event.listen(engine, "connect", _look)
            event.listen(engine, "checkout", _leave_demoted)
        else:
            event.listen(engine, "handle_error", _leave_read_only)
        return engine
    raise ValueError(
        f"ledger: found {without_credentials(url)!r}; allowed: sqlite:///PATH, postgresql://USER:PASSWORD@HOST/NAME"
    )


def _snapshot(connection: Connection) -> None:
    """Make the transaction read-only. A reader blocks nobody, so it has no timeouts."""
    connection.exec_driver_sql("SET TRANSACTION READ ONLY")


def _leave_read_only(context: ExceptionContext) -> None:
    """Treat a session that cannot write as a lost one. After a failover, sessions may stay with the old primary; SQLAlchemy then
    drops it and all sessions of the pool, and the next transaction opens one where the address leads now."""
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


def _look(session: Any, record: Any) -> None:
    """Remember of a reader's new session whether its server only reads: that of a standby does, and is as good as any."""
    record.info[ONLY_READS] = _only_reads(session)


def _leave_demoted(session: Any, record: Any, _: Any) -> None:
    """Leave a reader's session whose server has become one that only reads. No read of it would fail, and all of them would show
    the ledger as it was at the failover."""
    if _only_reads(session) and not record.info[ONLY_READS]:
        raise InvalidatePoolError("a failover has made its server read-only")


def _only_reads(session: Any) -> bool:
    with session.cursor() as cursor:
        cursor.execute(rights.ONLY_READS)
        found = bool(cursor.fetchone()[0])
    session.rollback()
    return found


def _hurried(connection: Connection) -> None:
    """Set the timeouts for waiting on a lock (LOCKED_S) and for silence (FROZEN_S) in this transaction. Poolers pass on neither
    session settings nor start-up options, so connecting is too early."""
    connection.exec_driver_sql(
        f"SELECT set_config('lock_timeout', '{LOCKED_S}s', true), "
        f"set_config('idle_in_transaction_session_timeout', '{FROZEN_S}s', true)"
    )


def end_silent(connection: Connection, table: str) -> int:
    """End the sessions that hold a row of `table` in a transaction whose client has said nothing for FROZEN_S. Return how many.

    PostgreSQL's own idle_in_transaction_session_timeout ends most of them. It does not end a client that fell silent within a batch
    of statements, whose session still counts as active while the server waits for the rest, nor after one: psycopg's executemany
    closes a batch with libpq's flush request, and that stops the server's clock. Return 0 on SQLite, where the lock goes with the
    process."""
    if connection.dialect.name != "postgresql":
        return 0
    return len(connection.execute(_END_SILENT, {"table": table, "seconds": FROZEN_S}).all())


def unhurried(connection: Connection) -> None:
    """Lift both timeouts for this transaction, for work that must not be cut off: migrations, reading a large run. Never for one
    that holds the lease."""
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql("SET LOCAL lock_timeout = 0")
        connection.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")


def _to_json(value: Any) -> str:
    return storable.to_json(value).decode()


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
