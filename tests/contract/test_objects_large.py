"""Large files: an upload that breaks off goes on where it was, and whatever the size, little memory is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.objects import ObjectMissing, ObjectsUnavailable, connect, multipart
from shared.objects.s3 import S3Objects
from tests.servers import need

PARTS = 6


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> S3Objects:
    for name, value in need("ETUDE_OBJECTS").items():
        monkeypatch.setenv(name, value)
    connected = connect(os.environ["ETUDE_OBJECTS"])
    assert isinstance(connected, S3Objects)
    return connected


@pytest.fixture
def key(objects: S3Objects) -> Iterator[str]:
    name = f"test/{uuid.uuid4().hex}/a b+ü.bin"
    yield name
    for one in unfinished(objects, name):
        objects._client._abort_multipart_upload(objects._bucket, name, one)
    objects.delete(name)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """PARTS parts, the last one short."""
    path = tmp_path / "source"
    path.write_bytes(os.urandom((PARTS - 1) * multipart.PART + 1000))
    return path


class Watched:
    """Counts the parts that are sent, and lets only the first `allowed` through: then the server seems to be gone."""

    def __init__(self, objects: S3Objects, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        self.allowed = 1000
        self.send = objects._client._upload_part
        self.lock = threading.Lock()
        monkeypatch.setattr(objects._client, "_upload_part", self)

    def __call__(self, bucket: str, key: str, data: bytes, headers: Any, upload_id: str, number: int) -> str:
        with self.lock:
            if len(self.sent) >= self.allowed:
                raise ConnectionError("gone")
            self.sent.append(number)
        return self.send(bucket, key, data, headers, upload_id, number)


def unfinished(objects: S3Objects, key: str) -> list[str]:
    found = objects._client._list_multipart_uploads(objects._bucket, prefix=key).uploads
    return [one.upload_id for one in found if one.object_name == key and one.upload_id]


def broken_off(objects: S3Objects, watched: Watched, key: str, source: Path, after: int) -> None:
    watched.allowed = after
    with pytest.raises(OSError, match="gone"):
        objects.put_file(key, source)
    watched.sent.clear()
    watched.allowed = 1000


def test_an_upload_that_broke_off_goes_on_where_it_was(objects, key, source, monkeypatch, tmp_path):
    watched = Watched(objects, monkeypatch)
    broken_off(objects, watched, key, source, after=4)
    with pytest.raises(ObjectMissing):
        objects.head(key)
    assert list(objects.list(key)) == []
    assert len(unfinished(objects, key)) == 1
    ref = objects.put_file(key, source)
    assert len(watched.sent) == PARTS - 4
    assert unfinished(objects, key) == []
    assert objects.head(key) == ref
    objects.get_file(ref, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes()


def test_it_goes_on_in_another_process_too(objects, key, source, monkeypatch):
    broken_off(objects, Watched(objects, monkeypatch), key, source, after=4)
    fresh = connect(os.environ["ETUDE_OBJECTS"])
    assert isinstance(fresh, S3Objects)
    watched = Watched(fresh, monkeypatch)
    assert fresh.get(fresh.put_file(key, source)) == source.read_bytes()
    assert len(watched.sent) == PARTS - 4


def test_another_file_of_the_same_beginning_ends_with_a_checksum_of_its_own(objects, key, source, monkeypatch):
    """Its parts fit, but the upload carries the other file's."""
    watched = Watched(objects, monkeypatch)
    broken_off(objects, watched, key, source, after=4)
    with source.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!!")  # a byte longer, too
    ref = objects.put_file(key, source)
    assert objects.get(objects.head(key)) == source.read_bytes()
    assert objects.head(key) == ref


def test_a_part_that_does_not_fit_is_sent_again(objects, key, source, monkeypatch):
    watched = Watched(objects, monkeypatch)
    broken_off(objects, watched, key, source, after=4)
    (upload_id,) = unfinished(objects, key)
    number = min(multipart._parts(objects._client, objects._bucket, key, upload_id))
    watched.send(objects._bucket, key, os.urandom(multipart.PART), None, upload_id, number)
    assert objects.get(objects.put_file(key, source)) == source.read_bytes()
    assert len(watched.sent) == PARTS - 3
    assert number in watched.sent


def test_a_stale_upload_of_another_file_is_aborted_and_a_young_one_is_not(objects, key, source, monkeypatch):
    other = objects._client._create_multipart_upload(objects._bucket, key, {})
    objects.put_file(key, source)
    assert unfinished(objects, key) == [other]  # somebody may be at it
    monkeypatch.setattr(multipart, "STALE_S", -60.0)
    objects.put_file(key, source)
    assert unfinished(objects, key) == []


def test_an_upload_that_somebody_aborts_meanwhile_may_be_repeated(objects, key, source, monkeypatch):
    watched = Watched(objects, monkeypatch)
    send = watched.send

    def aborts(bucket: str, key: str, data: bytes, headers: Any, upload_id: str, number: int) -> str:
        if number == 3:
            objects._client._abort_multipart_upload(bucket, key, upload_id)
        return send(bucket, key, data, headers, upload_id, number)

    watched.send = aborts
    with pytest.raises(ObjectsUnavailable):
        objects.put_file(key, source)
    watched.send = send

    assert objects.get(objects.put_file(key, source)) == source.read_bytes()
    assert unfinished(objects, key) == []


@pytest.mark.parametrize("size", [1, multipart.PART, multipart.PART * 9_999 + 1, 5 << 40])
def test_no_file_has_more_parts_than_the_server_takes(size):
    length = multipart.part_length(size)
    assert length >= multipart.PART
    assert -(-size // length) <= multipart.MOST


SIZE = 4 << 30
MOST_MIB = 256


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("store", ["directory", "s3"])
def test_four_gibibytes_go_through_little_memory(store, tmp_path, monkeypatch):
    """In a process of its own; VmHWM, since `ru_maxrss` begins with what the process that started it had."""
    url = f"file:{tmp_path / 'objects'}"
    if store == "s3":
        for name, value in need("ETUDE_OBJECTS").items():
            monkeypatch.setenv(name, value)
        url = os.environ["ETUDE_OBJECTS"]
    source, back = tmp_path / "source", tmp_path / "back"
    with source.open("wb") as file:
        file.truncate(SIZE)
    script = textwrap.dedent(f"""
        import pathlib, time
        from shared import objects
        store, key = objects.connect({url!r}), "test/{uuid.uuid4().hex}/large"
        source, back = pathlib.Path({str(source)!r}), pathlib.Path({str(back)!r})
        try:
            began = time.monotonic()
            ref = store.put_file(key, source)
            put = time.monotonic()
            store.get_file(store.head(key), back)
            got = time.monotonic()
        finally:
            store.delete(key)
        assert ref.size == back.stat().st_size == {SIZE}
        (line,) = [x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:")]
        peak = int(line.split()[1]) // 1024
        print(peak, round(put - began, 1), round(got - put, 1))
    """)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        peak_mib, put_s, get_s = done.stdout.split()
        print(f"{store}: peak {peak_mib} MiB, put {put_s} s, get {get_s} s")
        assert int(peak_mib) < MOST_MIB
    finally:
        for path in (source, back):
            path.unlink(missing_ok=True)
