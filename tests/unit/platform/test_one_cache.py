"""Several checkouts share the cache of programs: one fetches or builds a program, and the others wait for it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from infra.servers import debian, kafka, minio
from tests.patience import patient, until


def _of_debian(monkeypatch: pytest.MonkeyPatch, make) -> None:
    def unpack(package: str, root: Path) -> None:
        make(root)
        (root / "usr" / "bin").mkdir(parents=True)
        (root / "usr" / "bin" / "no-such-program").touch(mode=0o755)

    monkeypatch.setattr(debian, "_unpack", unpack)
    found = debian.program("no-such-program", "no-such-package")
    assert found.parts[-5:] == ("debian", "no-such-package", "usr", "bin", "no-such-program")


def _of_minio(monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setattr(minio, "_build", make)
    monkeypatch.setattr(minio.Minio, "program", minio.CACHE / "minio-of-a-test")
    minio.Minio().install()


def _of_kafka(monkeypatch: pytest.MonkeyPatch, make) -> None:
    monkeypatch.setattr(kafka, "_java", lambda: Path("/java"))
    monkeypatch.setattr(kafka, "_download", make)
    kafka.Kafka().install()


@pytest.mark.parametrize("install", [_of_debian, _of_minio, _of_kafka])
def test_of_two_that_lack_a_program_one_makes_it(monkeypatch, tmp_path, capsys, install) -> None:
    for module in ("infra.servers", "infra.servers.debian", "infra.servers.minio", "infra.servers.kafka"):
        monkeypatch.setattr(f"{module}.CACHE", tmp_path / "cache")
    made: list[Path] = []
    begun, go_on = threading.Event(), threading.Event()

    def make(target: Path) -> None:
        made.append(target)
        begun.set()
        assert go_on.wait(patient(30))
        target.mkdir(parents=True)

    def ask() -> None:
        install(monkeypatch, make)

    one, other = threading.Thread(target=ask), threading.Thread(target=ask)
    one.start()
    assert begun.wait(patient(30))
    other.start()
    until(
        lambda: "another process is fetching or building it; waiting" in capsys.readouterr().out, "the second to wait"
    )
    go_on.set()
    one.join(patient(30))
    other.join(patient(30))
    assert len(made) == 1
    assert not one.is_alive()
    assert not other.is_alive()
