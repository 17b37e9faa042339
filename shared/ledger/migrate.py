"""Brings a ledger to the tables of this code. The migrations are part of the package, so that an installed one has them."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, inspect

HEAD = "0001"  # the newest migration; a test holds it against the files. Alembic itself is loaded only to migrate.


class LedgerOutdated(RuntimeError):
    """The ledger's tables are not those that this code reads; the text says which and what to do."""


def upgrade(engine: Engine) -> None:
    """Applies what is missing, in one transaction; two processes that start at once do it one after the other."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('etude.ledger.migrations'))")
        current = revision(connection)
        if current != HEAD:
            _migrate(connection, current)


def require_current(engine: Engine) -> None:
    """For readers, which never migrate. Raises LedgerOutdated."""
    with engine.begin() as connection:
        current = revision(connection)
    if current != HEAD:
        raise LedgerOutdated(
            f"the ledger is at migration {current!r}, this version of Étude reads {HEAD!r}; "
            "start the scheduler of this version once: it migrates"
        )


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
        raise LedgerOutdated(
            f"the ledger is at migration {current!r}, which this version of Étude does not know "
            f"(newest known: {HEAD!r}): it was written by a newer one; update this installation"
        )
    command.upgrade(config, "head")
