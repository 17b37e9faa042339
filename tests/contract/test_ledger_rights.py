"""A role that lacks a right on PostgreSQL is refused with the way out, by what looks and by what migrates."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from sqlalchemy import URL, create_engine, make_url

from shared import ledger
from tests.servers import need


@pytest.fixture
def plain() -> Iterator[URL]:
    """A database that another role owns, and the address of a role without a right to make tables there."""
    admin = make_url(need("ETUDE_LEDGER")["ETUDE_LEDGER"]).set(drivername="postgresql+psycopg")
    name = f"plain_{secrets.token_hex(4)}"
    engine = create_engine(admin, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD 'plain'")
        connection.exec_driver_sql(f"CREATE DATABASE {name}")
    try:
        yield admin.set(username=name, password="plain", database=name, query={})
    finally:
        with engine.connect() as connection:
            connection.exec_driver_sql(f"DROP DATABASE {name} WITH (FORCE)")
            connection.exec_driver_sql(f"DROP ROLE {name}")
        engine.dispose()


def test_without_a_right_to_create_tables_the_ledger_is_refused_with_the_grant(plain: URL) -> None:
    engine = ledger.connect(plain.render_as_string(hide_password=False))
    try:
        for opening in (ledger.reach, ledger.upgrade):
            with pytest.raises(ledger.LedgerUnavailable) as refused:
                opening(engine)
            assert "permission denied for schema public" in str(refused.value)
            assert f'GRANT CREATE, USAGE ON SCHEMA "public" TO "{plain.username}"' in str(refused.value)
            assert "plain:plain" not in str(refused.value)
    finally:
        engine.dispose()


def test_the_grant_that_is_named_opens_the_ledger(plain: URL) -> None:
    owner = make_url(need("ETUDE_LEDGER")["ETUDE_LEDGER"]).set(drivername="postgresql+psycopg", database=plain.database)
    granting = create_engine(owner)
    with granting.begin() as connection:
        connection.exec_driver_sql(f'GRANT CREATE, USAGE ON SCHEMA "public" TO "{plain.username}"')
    granting.dispose()
    engine = ledger.connect(plain.render_as_string(hide_password=False))
    try:
        ledger.upgrade(engine)
        assert ledger.reach(engine) is not None
    finally:
        engine.dispose()


def test_tables_of_another_role_are_refused_with_the_way_out(plain: URL) -> None:
    owner = make_url(need("ETUDE_LEDGER")["ETUDE_LEDGER"]).set(drivername="postgresql+psycopg", database=plain.database)
    owning = ledger.connect(owner.render_as_string(hide_password=False))
    ledger.upgrade(owning)
    owning.dispose()
    engine = ledger.connect(plain.render_as_string(hide_password=False))
    try:
        with pytest.raises(ledger.LedgerUnavailable, match="OWNER TO"):
            ledger.reach(engine)
    finally:
        engine.dispose()
