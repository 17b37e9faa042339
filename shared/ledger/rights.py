"""Which rights on PostgreSQL a ledger needs, and what to do about those that are missing."""

from __future__ import annotations

from sqlalchemy import URL, Connection
from sqlalchemy.exc import DBAPIError

_MISSING = {"42501", "3F000"}  # SQLSTATE: insufficient privilege, no schema to create in
ONLY_READS = "SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean"
_SCHEMA = "SELECT coalesce(current_schema(), 'public')"
# A list of rights in one call would ask for any of them.
_CREATES = (
    "SELECT has_schema_privilege(name, 'CREATE') AND has_schema_privilege(name, 'USAGE') "
    f"FROM ({_SCHEMA} AS name) AS named"
)


def missing(error: DBAPIError) -> bool:
    """Say whether the server refused a statement for want of a right."""
    return getattr(error.orig, "sqlstate", None) in _MISSING


def why_not_create(connection: Connection) -> str | None:
    """Return why this role cannot make the ledger's tables and the way out; None: it can, or this is SQLite."""
    if connection.dialect.name != "postgresql" or connection.exec_driver_sql(_CREATES).scalar():
        return None
    schema = connection.exec_driver_sql(_SCHEMA).scalar()
    return f"permission denied for schema {schema}: no right to create tables there. {way_out(connection.engine.url, str(schema))}"


def why_not_write(connection: Connection) -> str | None:
    """Return why nobody can write here, and the way out; None: a role with the rights can, or this is SQLite."""
    if connection.dialect.name != "postgresql" or not connection.exec_driver_sql(ONLY_READS).scalar():
        return None
    return (
        "this server only reads: it is a standby, or was the primary before a failover. Way out: name the primary, or an "
        "address that follows it (docs/servers.md, Fail-overs)"
    )


def way_out(url: URL, schema: str = "public") -> str:
    """Return the statements that give the address's role what a ledger needs."""
    role, database = f'"{url.username or "ROLE"}"', f'"{url.database or "DATABASE"}"'
    return (
        f"A ledger needs a role that makes and owns its tables. Way out, as the owner or a superuser in {database}: "
        f'GRANT CREATE, USAGE ON SCHEMA "{schema}" TO {role}; or ALTER DATABASE {database} OWNER TO {role}; tables that another '
        f"role made: ALTER TABLE name OWNER TO {role} for each"
    )
