"""Brings a ledger to the tables of this code. The migrations are part of the package, so that an installed one has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from sqlalchemy import Connection, Engine, inspect
from sqlalchemy.exc import DBAPIError

from shared.ledger import addresses, rights
from shared.ledger.engine import connect, unhurried
from shared.settings import Told

HEAD = "0009"  # the newest migration; a test holds it against the files. Alembic itself is loaded only to migrate.


class LedgerOutdated(Told, RuntimeError):
    """The ledger's tables are not those that this code reads; the text says which and what to do."""


class LedgerUnavailable(Told, RuntimeError):
    """The database cannot be reached, or does not let us in; the text says what was found and what to do."""


@contextlib.contextmanager
def _begun(engine: Engine) -> Iterator[Connection]:
    """A transaction, if the database takes part. Raises LedgerUnavailable; BadSettings where a pooler dropped what the address
    asks for."""
    try:
        connection = engine.connect()
    except DBAPIError as error:
        reason = " ".join(str(error.orig).split())
        raise LedgerUnavailable(
            f"ledger (ETUDE_LEDGER): {engine.url}: {reason}. {addresses.advice(engine.url, reason)}"
        ) from None
    try:
        with connection, connection.begin():
            addresses.require_kept(connection)
            yield connection
    except DBAPIError as error:
        if not rights.missing(error):
            raise
        reason = " ".join(str(error.orig).split())
        raise LedgerUnavailable(
            f"ledger (ETUDE_LEDGER): {engine.url}: {reason}. {rights.way_out(engine.url)}"
        ) from None


def reach(engine: Engine) -> str | None:
    """The migration that the ledger is at; None: it is empty. Raises LedgerUnavailable, and LedgerOutdated for a ledger
    that a newer version of this code has written. On PostgreSQL it must also be possible to write, and to make the missing
    tables."""
    with _begun(engine) as connection:
        current = revision(connection)
        refused = rights.why_not_write(connection) or (rights.why_not_create(connection) if current != HEAD else None)
    if refused is not None:
        raise LedgerUnavailable(f"ledger (ETUDE_LEDGER): {engine.url}: {refused}")
    if current is not None and current > HEAD:
        raise _from_the_future(current)
    return current


def upgrade(engine: Engine) -> None:
    """Applies what is missing, in one transaction; two processes that start at once do it one after the other. Raises
    LedgerUnavailable, LedgerOutdated."""
    with _begun(engine) as connection:
        unhurried(connection)
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('etude.ledger.migrations'))")
        current = revision(connection)
        if current != HEAD:
            if refused := rights.why_not_write(connection):
                raise LedgerUnavailable(f"ledger (ETUDE_LEDGER): {engine.url}: {refused}")
            _migrate(connection, current)


def require_current(engine: Engine) -> None:
    """For readers, which never migrate. Raises LedgerUnavailable, LedgerOutdated."""
    with _begun(engine) as connection:
        current = revision(connection)
    if current != HEAD:
        raise LedgerOutdated(
            f"the ledger is at migration {current!r}, this version of Étude reads {HEAD!r}; "
            "start the scheduler of this version once: it migrates"
        )


def readable(url: str) -> Engine:
    """Connect to a ledger for reading alone. Raises LedgerMissing, LedgerOutdated, LedgerUnavailable, and ValueError for a URL that
    is none."""
    try:
        engine = connect(url, read_only=True)
        require_current(engine)
    except DBAPIError as error:
        raise LedgerUnavailable(f"the ledger cannot be read: {error.orig}") from None
    return engine


def revision(connection: Connection) -> str | None:
    """The migration that the ledger is at; None: it is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return None if found is None else str(found)


def _migrate(connection: Connection, current: str | None) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "shared.ledger:migrations")
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if current is not None and current not in known:
        raise _from_the_future(current)
    command.upgrade(config, "head")


def _from_the_future(current: str) -> LedgerOutdated:
    return LedgerOutdated(
        f"the ledger is at migration {current!r}, which this version of Étude does not know "
        f"(newest known: {HEAD!r}): it was written by a newer one; update this installation"
    )
