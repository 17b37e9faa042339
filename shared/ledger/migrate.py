"""Brings a ledger to the tables of this code. The migrations are part of the package, so that an installed one has them."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine


class LedgerOutdated(RuntimeError):
    """The ledger's tables are not those that this code reads; the text says which and what to do."""


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", "shared.ledger:migrations")
    config.attributes["connection"] = connection
    return config


def upgrade(engine: Engine) -> None:
    """Applies what is missing, in one transaction; two processes that start at once do it one after the other."""
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtext('etude.ledger.migrations'))")
        current = MigrationContext.configure(connection).get_current_revision()
        script = ScriptDirectory.from_config(_config())
        if current == script.get_current_head():
            return
        if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
            raise LedgerOutdated(
                f"the ledger is at migration {current!r}, which this version of Étude does not know "
                f"(newest known: {script.get_current_head()!r}): it was written by a newer one; update this installation"
            )
        command.upgrade(_config(connection), "head")


def require_current(engine: Engine) -> None:
    """For readers, which never migrate. Raises LedgerOutdated."""
    with engine.begin() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    head = ScriptDirectory.from_config(_config()).get_current_head()
    if current != head:
        raise LedgerOutdated(
            f"the ledger is at migration {current!r}, this version of Étude reads {head!r}; "
            "start the scheduler of this version once: it migrates"
        )
