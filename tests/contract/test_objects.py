"""What every object store promises. Runs on a directory, and on S3 (tests/servers.py)."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer import checkpoints
from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, Objects, ObjectsUnavailable, connect, directory, keys
from shared.objects.directory import DirectoryObjects
from shared.objects.s3 import CHECKSUM, S3Objects
from tests.servers import need
from tests.unconditional import unconditional


@pytest.fixture(params=["directory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Objects:
    if request.param == "s3":
        for name, value in need("ETUDE_OBJECTS").items():
            monkeypatch.setenv(name, value)
        return connect(os.environ["ETUDE_OBJECTS"])
    return connect(f"file:{tmp_path / 'objects'}")


@pytest.fixture
def prefix() -> str:
    return f"test/{uuid.uuid4().hex}"


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 9000])
def test_what_is_put_comes_back_with_its_size_and_checksum(objects, prefix, data):
    ref = objects.put(f"{prefix}/a b/ü.bin", data)
    assert (ref.key, ref.size, len(ref.checksum)) == (f"{prefix}/a b/ü.bin", len(data), 32)
    assert objects.get(ref) == data
    assert objects.head(ref.key) == ref


def test_files_stream_in_and_out(objects, prefix, tmp_path):
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_bytes(os.urandom(3_000_000))
    ref = objects.put_file(f"{prefix}/file", source)
    assert ref == objects.put(f"{prefix}/bytes", source.read_bytes()).__class__(
        key=ref.key, size=ref.size, checksum=ref.checksum
    )
    target.write_bytes(b"old")
    objects.get_file(ref, target)
    assert target.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["in", "out"]


def test_a_missing_object_is_named(objects, prefix, tmp_path):
    ref = Ref(key=f"{prefix}/none", size=1, checksum="0" * 32)
    for act in (lambda: objects.get(ref), lambda: objects.head(ref.key), lambda: objects.get_file(ref, tmp_path / "x")):
        with pytest.raises(ObjectMissing, match="none"):
            act()
    assert not (tmp_path / "x").exists()
    objects.delete(ref.key)


def test_other_bytes_than_the_reference_names_are_damage(objects, prefix, tmp_path):
    ref = objects.put(f"{prefix}/a", b"good")
    for wrong in (msgspec.structs.replace(ref, checksum="0" * 32), msgspec.structs.replace(ref, size=3)):
        with pytest.raises(ObjectDamaged, match="a"):
            objects.get(wrong)
        with pytest.raises(ObjectDamaged):
            objects.get_file(wrong, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_put_replaces_and_put_if_absent_does_not(objects, prefix):
    first = objects.put_if_absent(f"{prefix}/claim", b"first")
    assert first is not None
    assert objects.put_if_absent(f"{prefix}/claim", b"second") is None
    assert objects.get(first) == b"first"
    assert objects.get(objects.put(f"{prefix}/claim", b"third")) == b"third"


def test_exactly_one_of_many_wins_a_conditional_put(objects, prefix):
    for round_number in range(5):
        key = f"{prefix}/incarnation/{round_number}"
        with ThreadPoolExecutor(8) as pool:
            refs = list(pool.map(lambda i, key=key: objects.put_if_absent(key, str(i).encode()), range(8)))
        (winner,) = [ref for ref in refs if ref]
        assert objects.head(key) == winner


def test_list_gives_the_keys_under_a_prefix_in_order(objects, prefix):
    names = ["b", "a/1", "a/2/x", "a-1", "ab/3", "c/d"]
    for name in names:
        objects.put(f"{prefix}/{name}", b"")
    assert list(objects.list(f"{prefix}/")) == sorted(f"{prefix}/{name}" for name in names)
    assert list(objects.list(f"{prefix}/a/")) == [f"{prefix}/a/1", f"{prefix}/a/2/x"]
    assert list(objects.list(f"{prefix}/a")) == [f"{prefix}/{n}" for n in ("a-1", "a/1", "a/2/x", "ab/3")]
    assert list(objects.list(f"{prefix}/none/")) == []
    objects.delete(f"{prefix}/a/1")
    assert list(objects.list(f"{prefix}/a/")) == [f"{prefix}/a/2/x"]


def test_sizes_are_those_of_what_is_listed(objects, prefix):
    sizes = {"b": 0, "a/1": 1, "a/2/ü x": 70_000, "a-1": 3, "ab/3": 9_000_000}
    for name, size in sizes.items():
        objects.put(f"{prefix}/{name}", b"x" * size)
    for within in (f"{prefix}/", f"{prefix}/a/", f"{prefix}/a", f"{prefix}/none/"):
        found = list(objects.sizes(within))
        assert [key for key, _ in found] == list(objects.list(within))
        assert {key.removeprefix(f"{prefix}/"): size for key, size in found}.items() <= sizes.items()
    objects.delete(f"{prefix}/ab/3")
    assert sum(size for _, size in objects.sizes(f"{prefix}/")) == 70_004


def test_what_is_deleted_while_a_directory_is_listed_is_passed_over(tmp_path):
    objects = DirectoryObjects(tmp_path / "o")
    for name in "abc":
        objects.put(f"x/{name}", b"1")
    listing = objects.sizes("x/")
    assert next(listing) == ("x/a", 1)
    objects.delete("x/b")
    assert list(listing) == [("x/c", 1)]


BAD_KEYS = ["", "/", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", ".", "a/./b", "a\\b", "a\x00b", "a\nb", ".tmp/x"]


def test_puts_beside_deletes_in_the_same_folders_all_succeed(objects, prefix):
    def put_and_delete(worker: int) -> None:
        for round_ in range(40):
            key = f"{prefix}/a/{round_ % 2}/{worker}"
            ref = objects.put_if_absent(key, b"x") if round_ % 3 else objects.put(key, b"x")
            assert objects.get(ref) == b"x"
            objects.delete(key)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(put_and_delete, range(4)))
    assert list(objects.list(prefix)) == []


def test_a_directory_keeps_no_folder_of_what_was_deleted(tmp_path):
    """A trainer deletes a checkpoint with every step, and looks through their folders with every step."""
    objects = connect(f"file:{tmp_path / 'objects'}")
    for key in ("runs/r/checkpoints/0000-1/manifest.json", "runs/r/checkpoints/0000-1/state", "runs/r/config.json"):
        objects.put(key, b"x")
    objects.delete("runs/r/checkpoints/0000-1/manifest.json")
    assert list(objects.list("runs/r/checkpoints/")) == ["runs/r/checkpoints/0000-1/state"]
    objects.delete("runs/r/checkpoints/0000-1/state")
    assert [path.name for path in (tmp_path / "objects" / "runs" / "r").iterdir()] == ["config.json"]
    objects.delete("runs/r/config.json")
    assert [path.name for path in (tmp_path / "objects").iterdir()] == [".tmp"]


@pytest.mark.parametrize("key", [*BAD_KEYS, "x" * 1025, "\ud800"])
def test_a_key_that_is_no_plain_path_is_refused(objects, key, tmp_path):
    with pytest.raises(ValueError, match="object key"):
        objects.put(key, b"x")
    with pytest.raises(ValueError, match="object key"):
        objects.get(Ref(key=key, size=1, checksum=""))


@given(st.text(max_size=40))
@settings(max_examples=300)
def test_no_key_that_passes_the_check_leaves_the_directory(key):
    try:
        keys.check(key)
    except ValueError:
        return
    root = Path("/objects")
    assert os.path.normpath(root / key) == str(root / key)
    assert (root / key).is_relative_to(root)


def test_an_object_cannot_lie_under_anothers_key_in_a_directory(tmp_path):
    objects = DirectoryObjects(tmp_path / "o")
    objects.put("a/b", b"1")
    for key in ("a", "a/b/c"):
        with pytest.raises(ValueError, match="under the key of another"):
            objects.put(key, b"2")
        with pytest.raises(ValueError, match="under the key of another"):
            objects.put_if_absent(key, b"2")
    assert list(objects.list("")) == ["a/b"]


def flip(objects: Objects, ref: Ref) -> None:
    """One bit of what lies under `ref.key` changes, and nothing that the store knows about it."""
    raw = bytearray(objects.get(ref))
    raw[len(raw) // 2] ^= 1
    if isinstance(objects, DirectoryObjects):
        (objects.root / ref.key).write_bytes(raw)
    else:
        assert isinstance(objects, S3Objects)
        metadata: dict[str, str | list[str] | tuple[str]] = {CHECKSUM: ref.checksum}
        objects._client.put_object(objects._bucket, ref.key, io.BytesIO(raw), len(raw), metadata=metadata)


@pytest.mark.parametrize("how", ["put", "put_file", "put_if_absent"])
def test_a_flipped_bit_is_damage_even_if_the_reference_was_asked_for_afterwards(objects, prefix, tmp_path, how):
    """It may well be valid JSON still."""
    data = b'{"step": 40, "loss": 0.125}' * 40
    (tmp_path / "file").write_bytes(data)
    ref = getattr(objects, how)(f"{prefix}/a", tmp_path / "file" if how == "put_file" else data)
    flip(objects, ref)
    for found in (ref, objects.head(ref.key)):
        with pytest.raises(ObjectDamaged, match="checksum"):
            objects.get(found)
        with pytest.raises(ObjectDamaged, match="checksum"):
            objects.get_file(found, tmp_path / "back")
    assert objects.get(objects.put(ref.key, b"new")) == b"new"
    assert objects.get(objects.head(ref.key)) == b"new"


def test_a_directory_without_attributes_is_read_and_written_all_the_same(tmp_path, monkeypatch):
    """What an older version wrote, a copy that left them behind, a file system that has none."""
    objects = DirectoryObjects(tmp_path / "o")
    old = objects.put("old", b"old")
    with contextlib.suppress(OSError):  # this disk may have no attributes itself
        os.removexattr(tmp_path / "o" / "old", directory.CHECKSUM)
    assert objects.head("old") == old
    assert objects.get(objects.head("old")) == b"old"

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "setxattr", unsupported)
    new = objects.put_if_absent("new", b"new")
    assert new is not None
    assert objects.head("new") == new
    assert objects.get(objects.head("new")) == b"new"
    assert list(objects.list("")) == ["new", "old"]


def test_a_durable_put_syncs_the_object_and_every_new_folder_above_it(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    objects = DirectoryObjects(tmp_path / "made" / "o", fsync=True)
    objects.put("first", b"x")
    assert {str(tmp_path), str(tmp_path / "made")} <= set(synced)  # the entries of `made` and `o`
    root = tmp_path / "made" / "o"
    for key, folders in (
        ("a/b/c/x", ["", "a", "a/b", "a/b/c"]),
        ("a/b/c/y", ["a/b/c"]),
        ("a/z/x", ["a", "a/z"]),
    ):
        synced.clear()
        objects.put_if_absent(key, b"x")
        assert {path for path in synced if "/.tmp/" not in path} == {str(root / folder) for folder in folders}
        assert any("/.tmp/" in path for path in synced)


@pytest.mark.parametrize("fsync", [False, True])
def test_killed_while_writing_leaves_whole_objects_only(tmp_path, fsync):
    script = textwrap.dedent(f"""
        import itertools
        from pathlib import Path
        from shared.objects.directory import DirectoryObjects
        objects = DirectoryObjects(Path({str(tmp_path / "o")!r}), fsync={fsync})
        for i in itertools.count():
            data = bytes([i % 256]) * 300_000
            objects.put("same", data)
            objects.put(f"many/{{i % 10}}", data)
            print(i, flush=True)
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    for _ in range(20):
        assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    objects = DirectoryObjects(tmp_path / "o")
    found = list(objects.list(""))
    assert len(found) == 11
    for key in found:
        assert len(set(objects.get(objects.head(key)))) == 1
        assert objects.head(key).size == 300_000


def test_who_only_looks_into_a_directory_makes_none(tmp_path):
    objects = DirectoryObjects(tmp_path / "o")
    assert list(objects.list("")) == []
    with pytest.raises(ObjectMissing):
        objects.head("a")
    objects.delete("a")
    assert not list(tmp_path.iterdir())


def test_a_temporary_of_a_process_long_dead_is_swept(tmp_path):
    DirectoryObjects(tmp_path / "o").put("a", b"x")
    old, new = tmp_path / "o" / ".tmp" / "old", tmp_path / "o" / ".tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert list(DirectoryObjects(tmp_path / "o").list("")) == ["a"]
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize("url", ["", "ftp://x", "file:", "file:/x?fsync=2", "s3://b", "s3://@h:1"])
def test_an_url_that_is_none_says_what_is_allowed(url):
    with pytest.raises(ValueError, match="allowed"):
        connect(url)


_ERROR = b"<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>"
DENIED = b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s" % (
    len(_ERROR),
    _ERROR,
)


class SpoilsAnswers:
    """Before a server: passes everything on but the answers to the first PUTs. `instead`: what the client is sent in place of
    each; after that, or where it is empty, the connection is dropped."""

    def __init__(self, host: str, port: int, instead: bytes = b"", times: int = 1) -> None:
        self.to, self.lost, self.instead, self.times = (host, port), 0, instead, times
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):  # closed: the end of the test
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self.carry, args=(client,), daemon=True).start()

    def carry(self, client: socket.socket) -> None:
        asked = b""
        with client, socket.create_connection(self.to) as server, contextlib.suppress(OSError):
            while True:
                ready, _, _ = select.select([client, server], [], [])
                source, sink = (client, server) if client in ready else (server, client)
                data = source.recv(1 << 16)
                if not data:
                    return
                if source is client:
                    asked = data[:3] if data[:4] in (b"PUT ", b"GET ", b"HEAD") else asked
                elif asked == b"PUT" and self.lost < self.times:
                    self.lost += 1
                    client.sendall(self.instead)
                    return
                sink.sendall(data)


@contextlib.contextmanager
def spoilt(monkeypatch: pytest.MonkeyPatch, **how: Any) -> Iterator[tuple[Objects, SpoilsAnswers]]:
    """Yield the store behind SpoilsAnswers."""
    found = need("ETUDE_OBJECTS")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    bucket, _, server = found["ETUDE_OBJECTS"].removeprefix("s3://").partition("@")
    connect(found["ETUDE_OBJECTS"])  # makes the bucket: no answer to lose there
    host, _, port = server.partition(":")
    proxy = SpoilsAnswers(host, int(port), **how)
    with proxy.server:
        yield connect(f"s3://{bucket}@{proxy.address}"), proxy


def test_a_put_that_is_denied_in_passing_is_tried_again(prefix, tmp_path, monkeypatch):
    """MinIO denies a put whose folder a delete removes at that moment."""
    (tmp_path / "file").write_bytes(b"file")
    puts = {
        "put": lambda objects, key: objects.put(key, b"put"),
        "put_file": lambda objects, key: objects.put_file(key, tmp_path / "file"),
        "put_if_absent": lambda objects, key: objects.put_if_absent(key, b"put"),
    }
    for name, put in puts.items():
        with spoilt(monkeypatch, instead=DENIED, times=2) as (objects, proxy):
            ref = put(objects, f"{prefix}/{name}")
            assert proxy.lost == 2
            assert len(objects.get(ref)) == ref.size


def test_a_put_that_is_always_denied_says_which_rights_the_key_needs(prefix, monkeypatch):
    with spoilt(monkeypatch, instead=DENIED, times=99) as (objects, _):
        with pytest.raises(ObjectsUnavailable, match="give it a policy"):
            objects.put(f"{prefix}/key", b"put")


def test_a_conditional_put_whose_answer_was_lost_still_knows_that_it_won(prefix, monkeypatch):
    with spoilt(monkeypatch) as (objects, proxy):
        first = objects.put_if_absent(f"{prefix}/claim", b"mine")
        assert proxy.lost == 1
        assert first is not None
        assert objects.put_if_absent(f"{prefix}/claim", b"theirs") is None
        assert objects.get(first) == b"mine"


def test_a_store_that_ignores_the_condition_of_a_put_is_refused_by_each_process_at_its_first(prefix, monkeypatch):
    """Else two trainers would hold one incarnation, and two graders the first verdict."""
    found = need("ETUDE_OBJECTS")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    connect(found["ETUDE_OBJECTS"])  # makes the bucket
    with unconditional(found["ETUDE_OBJECTS"]) as address:
        objects = connect(address)
        assert objects.get(objects.put(f"{prefix}/any", b"plain")) == b"plain"
        for _ in range(2):
            with pytest.raises(ObjectsUnavailable, match="If-None-Match"):
                objects.put_if_absent(f"{prefix}/claim", b"mine")


def test_a_claim_by_eight_at_once_is_held_by_none_on_a_store_that_ignores_conditions(monkeypatch):
    found = need("ETUDE_OBJECTS")
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    connect(found["ETUDE_OBJECTS"])
    run, nothing = f"r-{uuid.uuid4().hex}", checkpoints.Resume(None, None, frozenset())

    def claim(address: str) -> int | None:
        try:
            return checkpoints.claim(connect(address), run, "trainer", nothing).incarnation
        except (ObjectsUnavailable, ObjectDamaged):  # damaged: another claim replaced it between two reads
            return None

    with unconditional(found["ETUDE_OBJECTS"]) as address, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(claim, [address] * 8)) == {None}
        claimed = [number for number in pool.map(claim, [found["ETUDE_OBJECTS"]] * 8) if number is not None]
    assert len(claimed) == len(set(claimed)) == 8


def test_a_file_of_many_parts_goes_through_little_memory(objects, prefix, tmp_path):
    """Far more than one part, and the peak of memory stays below it."""
    source, size = tmp_path / "big", 96 << 20
    with source.open("wb") as file:
        for i in range(size >> 20):
            file.write(bytes([i]) * (1 << 20))
    tracemalloc.start()
    try:
        ref = objects.put_file(f"{prefix}/big", source)
        objects.get_file(ref, tmp_path / "back")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ref.size == size
    assert (tmp_path / "back").stat().st_size == size
    assert peak < size / 2
