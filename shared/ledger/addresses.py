"""What the address of a PostgreSQL ledger may ask for, and whether a pooler on the way there handed it on.

A pooler in transaction mode (PgBouncer, and what works like it) gives each transaction another connection to the server. So
the ledger keeps nothing in a connection: psycopg prepares no statements there (`NEVER_PREPARED`), and locks, settings and
isolation are those of a transaction. LISTEN, temporary tables and cursors WITH HOLD are not used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from sqlalchemy import URL, Connection, text

from shared.settings import BadSettings

# psycopg prepares a statement at its sixth execution, under a name that it counts per client. Behind a pooler another client's
# statement may have that name, and is run in its place.
NEVER_PREPARED: dict[str, Any] = {"prepare_threshold": None}

OURS = ("lock_timeout", "idle_in_transaction_session_timeout")  # each transaction sets them, whatever the address says
_HAS = text(
    "SELECT current_setting(name) FROM pg_settings WHERE lower(name) = lower(:name) AND context IN ('user', 'superuser')"
)
_WOULD_HAVE = text("SELECT set_config(:name, :value, true)")
BY_ROLE = (
    "Way out: leave `options` out of the address, and let PostgreSQL keep the setting: ALTER ROLE {user} IN DATABASE "
    "{database} SET {name} = '{value}'"
)
_OTHERWISE = "Is the address right, does the database run and exist there, and are user and password its own?"


def require_known(url: URL) -> None:
    """Raise BadSettings for a parameter that libpq does not know. SQLAlchemy would hand it to psycopg's own function, as text."""
    from psycopg.pq import Conninfo

    known = sorted(option.keyword.decode() for option in Conninfo.get_defaults())
    for name in url.query:
        if name in known:
            continue
        if name == "prepare_threshold":
            hint = "no statement is prepared anyway, so that poolers work; leave it out"
        else:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
        raise BadSettings(  # without its value: the name may be a slip in `password`
            f"ledger (ETUDE_LEDGER): found parameter {name!r}; allowed: PostgreSQL's own, such as sslmode, sslrootcert and "
            f"application_name ({hint})"
        )


def require_kept(connection: Connection) -> None:
    """Raise BadSettings if a setting that the address names in `options` does not hold here: a pooler dropped it. Without its
    `search_path` a ledger would be made in another schema."""
    url = connection.engine.url
    if url.get_backend_name() != "postgresql":
        return
    for name, value in _named(url):
        has = connection.execute(_HAS, {"name": name}).scalar()
        if has is not None and has != connection.execute(_WOULD_HAVE, {"name": name, "value": value}).scalar():
            raise BadSettings(
                f"ledger (ETUDE_LEDGER): options: asked for {name}={value!r}, the server has {has!r}; a pooler in front of it "
                f"dropped `options`. {_by_role(url, name, value)}"
            )


def advice(url: URL, reason: str) -> str:
    """Return what to do about a connection that was refused for this reason."""
    if "statement pooling mode" in reason:
        return "A ledger needs whole transactions: set pool_mode = transaction for this database in pgbouncer.ini"
    if "unsupported startup parameter" in reason and (named := next(_named(url), None)):
        return f"That is a pooler. {_by_role(url, *named)}"
    return _OTHERWISE


def _by_role(url: URL, name: str, value: str) -> str:
    return BY_ROLE.format(user=url.username or "USER", database=url.database or "DATABASE", name=name, value=value)


def _named(url: URL) -> Iterator[tuple[str, str]]:
    """Yield the settings in `options` but OURS. PostgreSQL reads it like a command line: -c name=value, -cname=value,
    --name=value."""
    found = url.query.get("options", "")
    words = [
        re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:\\.|\S)+", found if isinstance(found, str) else "")
    ]
    for before, word in zip(["", *words], words, strict=False):
        setting = word if before == "-c" else word[2:] if word.startswith(("-c", "--")) else ""
        name, equals, value = setting.partition("=")
        if equals and name.replace("-", "_").lower() not in OURS:
            yield name.replace("-", "_"), value
