"""A ledger behind PgBouncer: in transaction mode it works, and `etude doctor` refuses by name what a pooler takes away."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError

from etude import reach
from shared import ledger
from shared.settings import BadSettings, ServiceSettings
from tests.pooler import pooled
from tests.servers import need

ROUNDS = 40  # psycopg prepares a statement at its sixth execution


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with pooled(tmp_path) as url:
        yield url


def asked(url: str, folder: Path) -> tuple[bool, str]:
    """What `etude doctor` says of this ledger."""
    return reach.ask(ServiceSettings(state=folder, ledger=url))["ledger"]


def test_a_client_gets_the_answer_to_its_own_statement_on_a_connection_that_another_one_prepared_on(
    address: str,
) -> None:
    """Client A leaves its statement on one server connection, B its own on the other; then A asks again, over B's."""
    a, b, other = (ledger.connect(address) for _ in range(3))
    try:
        with a.connect() as of_a, b.connect() as of_b, other.connect() as of_other:
            with of_a.begin(), of_b.begin():
                for _ in range(ROUNDS):
                    assert of_a.execute(text("SELECT 'of A'")).scalar() == "of A"
            with of_other.begin():
                of_other.execute(text("SELECT 1"))
                with of_b.begin():
                    for _ in range(ROUNDS):
                        assert of_b.execute(text("SELECT 'of B'")).scalar() == "of B"
                with of_a.begin():
                    assert of_a.execute(text("SELECT 'of A'")).scalar() == "of A"
    finally:
        for engine in (a, b, other):
            engine.dispose()


@pytest.mark.parametrize("read_only", [False, True])
def test_many_clients_on_few_connections_are_never_answered_for_one_another(address: str, read_only: bool) -> None:
    def client(name: int) -> None:
        draw, engine = random.Random(name), ledger.connect(address, read_only=read_only)
        try:
            for number in range(ROUNDS):
                with engine.begin() as connection:
                    for _ in range(draw.randrange(1, 5)):
                        shape = draw.randrange(3)
                        columns = ", ".join(f"CAST(:v{i} AS TEXT)" for i in range(shape + 1))
                        values = {f"v{i}": f"{name}-{number}-{i}" for i in range(shape + 1)}
                        answer = connection.execute(text(f"SELECT '{name}', {columns}"), values).one()
                        assert tuple(answer) == (str(name), *values.values())
        finally:
            engine.dispose()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(client, range(6)))


def test_doctor_passes_a_transaction_pooler(address: str, tmp_path: Path) -> None:
    assert asked(address, tmp_path) == (True, "PostgreSQL, migration none yet")


def test_doctor_refuses_a_pooler_that_gives_every_statement_another_connection(tmp_path: Path) -> None:
    with pooled(tmp_path, "statement") as url:
        ok, said = asked(url, tmp_path)
    assert not ok
    assert "ETUDE_LEDGER" in said
    assert "pool_mode = transaction" in said


SCHEMA = {"options": "-c search_path=elsewhere"}


def test_doctor_refuses_an_address_whose_settings_the_pooler_drops(tmp_path: Path) -> None:
    """The tables would be made in the schema `public`, without a word."""
    with pooled(tmp_path, ignore_startup_parameters="options") as plain:
        url = make_url(plain).update_query_dict(SCHEMA).render_as_string(hide_password=False)
        ok, said = asked(url, tmp_path)
        with pytest.raises(BadSettings, match="search_path"):
            ledger.upgrade(ledger.connect(url))
    assert not ok
    for word in ("ETUDE_LEDGER", "options", "search_path", "elsewhere", "ALTER ROLE"):
        assert word in said


def test_doctor_refuses_an_address_whose_settings_the_pooler_refuses(address: str, tmp_path: Path) -> None:
    url = make_url(address).update_query_dict(SCHEMA).render_as_string(hide_password=False)
    ok, said = asked(url, tmp_path)
    assert not ok
    for word in ("ETUDE_LEDGER", "options", "ALTER ROLE"):
        assert word in said


def test_settings_in_the_address_hold_without_a_pooler(tmp_path: Path) -> None:
    direct = make_url(need("ETUDE_LEDGER")["ETUDE_LEDGER"])
    options = {"options": "-c search_path=pg_temp,public --statement-timeout=90000 -cwork_mem=8192 -c lock_timeout=9s"}
    ok, said = asked(direct.update_query_dict(options).render_as_string(hide_password=False), tmp_path)
    assert ok, said


@pytest.mark.parametrize(
    "parameter", ["prepare_threshold=0", "prepare_threshold=None", "autocommit=1", "sslmod=require", "passwort=geheim"]
)
def test_a_parameter_of_the_address_that_postgresql_does_not_know_is_refused_by_name(
    parameter: str, tmp_path: Path
) -> None:
    """No server is needed to say so."""
    ok, said = asked(f"postgresql://u:geheim@127.0.0.1:1/d?{parameter}", tmp_path)
    assert not ok
    for word in ("ETUDE_LEDGER", repr(parameter.partition("=")[0]), "allowed"):
        assert word in said
    assert "geheim" not in said


@pytest.mark.parametrize("parameter", ["sslmode=perhaps", "connect_timeout=soon", "target_session_attrs=any&host=%00"])
def test_a_value_of_the_address_that_postgresql_does_not_know_is_told(parameter: str, tmp_path: Path) -> None:
    ok, said = asked(f"postgresql://u:geheim@127.0.0.1:1/d?{parameter}", tmp_path)
    assert not ok
    assert "ETUDE_LEDGER" in said
    assert "geheim" not in said


def test_a_transaction_pooler_keeps_what_the_ledger_says_in_a_transaction(address: str) -> None:
    """Locks of a transaction, its time limits and its isolation hold on whichever connection it gets, and on no other."""
    writer, reader = ledger.connect(address), ledger.connect(address, read_only=True)
    admin = create_engine(make_url(address).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")
    try:
        with ExitStack() as stack:
            holding, reading = stack.enter_context(writer.begin()), stack.enter_context(reader.begin())
            holding.execute(text("SELECT pg_advisory_xact_lock(7)"))
            for _ in range(3):
                assert holding.execute(text("SHOW lock_timeout")).scalar() == "3s"
                assert holding.execute(text("SHOW idle_in_transaction_session_timeout")).scalar() == "4s"
                assert reading.execute(text("SHOW transaction_read_only")).scalar() == "on"
                assert reading.execute(text("SHOW transaction_isolation")).scalar() == "repeatable read"
        with admin.connect() as connection:  # on a connection that one of them used
            assert connection.execute(text("SELECT pg_try_advisory_xact_lock(7)")).scalar()
            assert connection.execute(text("SHOW lock_timeout")).scalar() == "0"
            assert connection.execute(text("SHOW transaction_read_only")).scalar() == "off"
    finally:
        for engine in (writer, reader, admin):
            engine.dispose()


def test_a_writer_that_stands_still_behind_a_pooler_loses_its_transaction_and_its_locks(address: str) -> None:
    first, second = ledger.connect(address), ledger.connect(address)
    try:
        with second.begin() as connection:
            connection.execute(text("CREATE TABLE lease (term INT)"))
            connection.execute(text("INSERT INTO lease VALUES (1)"))
        with ExitStack() as stack:
            frozen = stack.enter_context(first.connect())
            frozen.execute(text("UPDATE lease SET term = 2"))
            written = False
            for _ in range(3):  # each waits for the row for as long as a statement may
                with suppress(DBAPIError), second.begin() as connection:
                    connection.execute(text("UPDATE lease SET term = 3"))
                    written = True
                    break
            assert written
            with pytest.raises(DBAPIError):
                frozen.execute(text("UPDATE lease SET term = 4"))
        with second.begin() as connection:
            assert connection.execute(text("SELECT term FROM lease")).scalars().all() == [3]
    finally:
        for engine in (first, second):
            engine.dispose()
