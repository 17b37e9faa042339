"""The real servers that tests run against, beside the embedded adapters.

They are those of `make servers`. ETUDE_TEST_SERVERS says what a test does when one does not run: `auto` (the default)
skips it, `require` fails it (so does `make ci`), `none` skips it even where one runs.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine, make_url

from infra.servers import state
from tests import missing

POLICIES = ("auto", "require", "none")
COMMAND = "make servers"
SERVER = {"ETUDE_BUS": "Kafka", "ETUDE_LEDGER": "PostgreSQL", "ETUDE_OBJECTS": "MinIO", "ETUDE_JOBS": "Redis"}


def need(*settings: str) -> dict[str, str]:
    """The variables with which a service uses the servers behind `settings` (of SERVER; none named: all of them)."""
    policy = os.environ.get("ETUDE_TEST_SERVERS", "auto")
    if policy not in POLICIES:
        pytest.fail(f"ETUDE_TEST_SERVERS: found {policy!r}; allowed: {', '.join(POLICIES)}")
    found = {} if policy == "none" else _running()
    absent = [SERVER[name] for name in settings or SERVER if name not in found]
    if absent and policy == "none":
        pytest.skip("ETUDE_TEST_SERVERS=none")
    if absent and policy == "require":
        pytest.fail(missing.reason(absent, COMMAND))
    if absent:
        missing.skip(absent, COMMAND)
    return {name: found[name] for name in found if name in settings or not settings or name.startswith("ETUDE_S3_")}


@functools.cache
def _running() -> dict[str, str]:
    return state.settings()


@contextlib.contextmanager
def own_schema(ledger: str) -> Iterator[str]:
    """The address of an empty ledger: a schema of its own, dropped afterwards."""
    schema = f"test_{secrets.token_hex(6)}"
    url = make_url(ledger).set(drivername="postgresql+psycopg")
    admin = create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)  # it may have been away meanwhile
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE SCHEMA {schema}")
    try:
        yield url.update_query_dict({"options": f"-csearch_path={schema}"}).render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.exec_driver_sql(f"DROP SCHEMA {schema} CASCADE")
        admin.dispose()


_platforms = itertools.count()  # of this process


def own_jobs() -> str:
    """Return the address of one of Redis' databases 1 to 15. Tests that run side by side in several processes share none."""
    worker, workers = (
        os.environ.get("PYTEST_XDIST_WORKER", "gw0"),
        int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")),
    )
    mine = range(1 + int(worker.removeprefix("gw")), 16, workers)
    return f"{need('ETUDE_JOBS')['ETUDE_JOBS'].rpartition('/')[0]}/{mine[next(_platforms) % len(mine)]}"


@contextlib.contextmanager
def own_platform() -> Iterator[dict[str, str]]:
    """The variables of an empty platform on all servers, alone among others: a prefix of topics and groups, a schema, a
    bucket, a database of Redis. Needs all servers."""
    found = need()
    name = f"test-{secrets.token_hex(6)}"
    jobs = own_jobs()
    bus = f"{found['ETUDE_BUS']}/{name}"
    with own_schema(found["ETUDE_LEDGER"]) as ledger:
        try:
            yield {
                **found,
                "ETUDE_BUS": bus,
                "ETUDE_LEDGER": ledger,
                "ETUDE_OBJECTS": f"s3://{name}@{found['ETUDE_OBJECTS'].partition('@')[2]}",
                "ETUDE_JOBS": jobs,
            }
        finally:
            _forget_topics(bus)
            _forget_jobs(jobs)


@pytest.fixture(params=["embedded", "servers"])
def platform_stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Twice: services started meanwhile use the embedded adapters, then an empty platform on the real servers."""
    with contextlib.ExitStack() as stack:
        if request.param == "servers":
            for name, value in stack.enter_context(own_platform()).items():
                monkeypatch.setenv(name, value)
        yield


def _forget_topics(bus: str) -> None:
    """So that a broker which served many tests stays quick."""
    from kafka import KafkaAdminClient

    from shared.bus.kafka_cluster import Cluster

    cluster = Cluster.parse(bus)
    admin = KafkaAdminClient(**cluster.options())
    try:
        admin.delete_topics([topic for topic in admin.list_topics() if topic.startswith(cluster.prefix)])
    finally:
        admin.close()


def _forget_jobs(jobs: str) -> None:
    from redis import Redis

    with Redis.from_url(jobs) as client:
        client.flushdb()
