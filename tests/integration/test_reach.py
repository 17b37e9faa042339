"""What a person reads who has named a server wrongly: the setting, what was found, what to do; soon, and no stack trace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from minio import MinioAdmin
from minio.credentials import StaticProvider
from sqlalchemy import text

from etude import reach
from shared import ledger, objects
from shared.bus import kafka_cluster
from shared.settings import ServiceSettings
from tests.patience import patient
from tests.servers import need, own_schema
from tests.unconditional import unconditional


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens; it stays nobody's for the length of a test."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def up(state: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`etude up` with these settings: what came of it."""
    return subprocess.run(
        [sys.executable, "-m", "etude.cli", "up", "--state", str(state)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )


def test_nobody_at_any_address(tmp_path: Path, nobody: str) -> None:
    done = up(
        tmp_path,
        ETUDE_BUS=f"kafka://{nobody}",
        ETUDE_LEDGER=f"postgresql://u:geheim@{nobody}/d",
        ETUDE_OBJECTS=f"s3://bucket@{nobody}",
        ETUDE_S3_ACCESS_KEY="k",
        ETUDE_S3_SECRET_KEY="geheim",
        ETUDE_JOBS=f"redis://:geheim@{nobody}/0",
    )
    assert done.returncode == 1
    for name in ("ETUDE_BUS", "ETUDE_LEDGER", "ETUDE_OBJECTS", "ETUDE_JOBS"):
        assert name in done.stderr
    assert done.stderr.count(nobody.partition(":")[2]) >= 4
    assert "Traceback" not in done.stderr
    assert "geheim" not in done.stderr


def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> tuple[bool, str]:
    """The answer of the one server that `variables` name."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(kafka_cluster, "FIRST_CONTACT_MS", int(patient(1_500)))
    ((_, answer),) = reach.ask(ServiceSettings(state=tmp_path)).items()
    return answer


@pytest.mark.parametrize("name", ["ETUDE_BUS", "ETUDE_LEDGER", "ETUDE_JOBS"])
def test_a_wrong_password_is_told_and_not_shown(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = need(name)[name]
    scheme, _, rest = right.partition("://")
    login, _, server = rest.rpartition("@")
    ok, words = asked(tmp_path, monkeypatch, **{name: f"{scheme}://{login.partition(':')[0]}:geheim@{server}"})
    assert not ok
    assert name in words
    assert "password" in words
    assert "geheim" not in words


@pytest.mark.parametrize(
    ("variable", "advice"), [("ETUDE_S3_SECRET_KEY", "does not fit"), ("ETUDE_S3_ACCESS_KEY", "does not know")]
)
def test_wrong_keys_of_the_object_store(
    variable: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok, words = asked(tmp_path, monkeypatch, **{**need("ETUDE_OBJECTS"), variable: "geheim"})
    assert not ok
    assert (variable in words, advice in words, "geheim" in words) == (True, True, False)


def test_an_access_key_that_may_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = need("ETUDE_OBJECTS")
    assert asked(tmp_path, monkeypatch, **named)[0]  # its owner makes the bucket, where no other test did
    owner = StaticProvider(named["ETUDE_S3_ACCESS_KEY"], named["ETUDE_S3_SECRET_KEY"])
    admin = MinioAdmin(endpoint=named["ETUDE_OBJECTS"].rpartition("@")[2], credentials=owner, secure=False)
    name, secret = f"reader-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    admin.user_add(name, secret)
    try:
        admin.attach_policy(["readonly"], user=name)
        reader = {**named, "ETUDE_S3_ACCESS_KEY": name, "ETUDE_S3_SECRET_KEY": secret}
        ok, words = asked(tmp_path, monkeypatch, **reader)
    finally:
        admin.user_remove(name)
    assert not ok
    assert "give it a policy" in words
    assert secret not in words


def test_an_object_store_without_conditional_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = need("ETUDE_OBJECTS")
    assert asked(tmp_path, monkeypatch, **named)[0]
    with unconditional(named["ETUDE_OBJECTS"]) as address:
        ok, words = asked(tmp_path, monkeypatch, ETUDE_OBJECTS=address)
    assert not ok
    for word in ("ETUDE_OBJECTS", address, "If-None-Match", "conditional writes"):
        assert word in words
    assert not list(objects.connect(named["ETUDE_OBJECTS"]).list("reach/"))


def test_a_ledger_from_the_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with own_schema(need("ETUDE_LEDGER")["ETUDE_LEDGER"]) as url:
        engine = ledger.connect(url)
        ledger.upgrade(engine)
        with engine.begin() as connection:
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        engine.dispose()
        ok, words = asked(tmp_path, monkeypatch, ETUDE_LEDGER=url)
    assert not ok
    assert "'9999'" in words
    assert "update this installation" in words


@pytest.mark.parametrize("name", ["ETUDE_BUS", "ETUDE_LEDGER", "ETUDE_OBJECTS", "ETUDE_JOBS"])
def test_a_server_that_is_there_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(tmp_path, monkeypatch, **need(name))[0]


def test_a_service_that_cannot_read_its_ledger_says_why_without_a_stack_trace(tmp_path: Path, nobody: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.scheduler"],
        env={**os.environ, "ETUDE_STATE": str(tmp_path), "ETUDE_LEDGER": f"postgresql://u:geheim@{nobody}/d"},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 1
    assert "ETUDE_LEDGER" in done.stderr
    assert "Traceback" not in done.stderr
    assert "geheim" not in done.stderr
