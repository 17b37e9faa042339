"""Bases on a machine: unpacked once, verified, never half there, and removed only while nobody has them open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shared.objects import Objects
from shared.objects.directory import DirectoryObjects
from shared.sandbox import SandboxUnavailable, bases
from shared.sandbox.bases import BaseRefused, cache, store
from tests.unit.sandbox.rootfs_world import Member, folder, link, member, store_base, tar_of


@pytest.fixture
def objects(tmp_path: Path) -> DirectoryObjects:
    return DirectoryObjects(tmp_path / "objects")


@pytest.fixture(autouse=True)
def let_go() -> object:
    yield
    for held in list(cache._holds):
        while held in cache._holds:
            bases.release(held / "root")


def made(objects: Objects, tmp_path: Path, name: str = "small", filler: int = 5, **changed: object) -> bases.Manifest:
    found: list[Member] = [
        folder("bin"),
        member("bin/sh", name.encode() + b"x" * filler, mode=0o755),
        link("etc", "/bin"),
    ]
    return store_base(objects, name, tar_of(*found), tmp_path, **changed)


def opened(objects: Objects | None, tmp_path: Path, image: str, **more: int) -> Path:
    return asyncio.run(bases.unpacked(objects, tmp_path / "cache", image, **more))


def test_a_base_is_opened_by_name_and_by_digest_and_is_one_folder(objects: Objects, tmp_path: Path) -> None:
    manifest = made(objects, tmp_path)
    root = opened(objects, tmp_path, "base:small")
    assert (root / "bin/sh").read_bytes() == b"smallxxxxx"
    assert opened(objects, tmp_path, f"base:{manifest.digest}") == root
    assert bases.manifest_of(root) == manifest
    assert sorted(path.name for path in root.parent.parent.iterdir()) == sorted([manifest.digest, "lock"])


def test_a_base_that_is_there_needs_no_store(objects: Objects, tmp_path: Path) -> None:
    manifest = made(objects, tmp_path)
    root = opened(objects, tmp_path, "base:small")
    assert opened(None, tmp_path, f"base:{manifest.digest}") == root
    with pytest.raises(BaseRefused, match="no object store"):
        opened(None, tmp_path, "base:small")
    with pytest.raises(BaseRefused, match="no object store"):
        opened(None, tmp_path, f"base:{'0' * 64}")


@pytest.mark.parametrize(
    ("image", "why"),
    [
        ("base:smell", "did you mean 'small'"),
        ("base:" + "0" * 64, "none with digest"),
        ("base:../x", "no name"),
        ("base:", "allowed: base:NAME"),
        ("docker:python", "allowed: base:NAME"),
        ("small", "allowed: base:NAME"),
    ],
)
def test_an_image_that_does_not_exist_is_refused(objects: Objects, tmp_path: Path, image: str, why: str) -> None:
    made(objects, tmp_path)
    with pytest.raises(BaseRefused, match=why):
        opened(objects, tmp_path, image)
    assert not (tmp_path / "cache").exists()


def test_a_base_of_another_machine_type_is_refused(objects: Objects, tmp_path: Path) -> None:
    made(objects, tmp_path, machine="s390x")
    with pytest.raises(BaseRefused, match=f"s390x, this machine is {store.machine()}"):
        opened(objects, tmp_path, "base:small")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"size": 3}, "more than 3 bytes"),
        ({"files": 2}, "more than 2 files"),
        ({"digest": "0" * 64}, "found digest"),
    ],
)
def test_what_is_not_as_its_manifest_says_is_damage(
    objects: Objects, tmp_path: Path, changed: dict[str, object], error: str
) -> None:
    made(objects, tmp_path, **changed)
    with pytest.raises(SandboxUnavailable, match=error):
        opened(objects, tmp_path, "base:small")
    assert [path.name for path in (tmp_path / "cache/bases").iterdir()] == ["lock"]


def test_a_manifest_beyond_the_maximum_is_refused(objects: Objects, tmp_path: Path) -> None:
    made(objects, tmp_path, size=1 << 50)
    with pytest.raises(BaseRefused, match="allowed: at most"):
        opened(objects, tmp_path, "base:small")


def test_a_damaged_or_missing_archive_is_infrastructure(objects: DirectoryObjects, tmp_path: Path) -> None:
    manifest = made(objects, tmp_path)
    archive = objects.root / manifest.archive.key
    data = archive.read_bytes()
    archive.write_bytes(data[:-1] + b"?")
    with pytest.raises(SandboxUnavailable, match="damaged"):
        opened(objects, tmp_path, "base:small")
    archive.unlink()
    with pytest.raises(SandboxUnavailable, match="missing"):
        opened(objects, tmp_path, "base:small")
    assert [path.name for path in (tmp_path / "cache/bases").iterdir()] == ["lock"]


def test_the_one_unused_longest_goes_when_the_cache_is_over_its_size(objects: Objects, tmp_path: Path) -> None:
    roots = []
    for n, name in enumerate(("first", "second", "third")):
        made(objects, tmp_path, name, 100_000)
        roots.append(opened(objects, tmp_path, f"base:{name}"))
        os.utime(roots[-1].parent, (n, n))
        bases.release(roots[-1])
    assert opened(objects, tmp_path, "base:first") == roots[0]  # used again, and held
    made(objects, tmp_path, "fourth", 100_000)
    opened(objects, tmp_path, "base:fourth", most_bytes=350_000)
    assert [root.exists() for root in roots] == [True, False, True]
    assert [base.manifest.name for base in bases.kept(tmp_path / "cache") if base.held] == ["first", "fourth"]
    assert [gone.name for gone in bases.trim(tmp_path / "cache", 0)] == ["third"]


def test_a_base_that_another_process_has_open_stays_until_that_is_killed(objects: Objects, tmp_path: Path) -> None:
    manifest = made(objects, tmp_path)
    script = (
        "import asyncio, sys, time; from pathlib import Path; from shared.sandbox import bases; "
        "from shared.objects.directory import DirectoryObjects; "
        "print(asyncio.run(bases.unpacked(DirectoryObjects(Path(sys.argv[1])), Path(sys.argv[2]), 'base:small')), flush=True); "
        "time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "objects"), str(tmp_path / "cache")], stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert manifest.digest in other.stdout.readline().decode()
        assert bases.trim(tmp_path / "cache", 0) == []
    finally:
        other.kill()
        other.communicate()
    assert bases.trim(tmp_path / "cache", 0) == [manifest]
    assert [path.name for path in (tmp_path / "cache/bases").iterdir()] == ["lock"]


class Counting(DirectoryObjects):
    """A store that counts how often a file is fetched, and waits with it."""

    fetched = 0
    gate: threading.Event | None = None

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = threading.Event()

    def get_file(self, ref: object, path: Path) -> None:
        self.fetched += 1
        self.begun.set()
        if self.gate:
            self.gate.wait(20)
        super().get_file(ref, path)  # type: ignore[arg-type]


def test_many_ask_and_one_unpacks(tmp_path: Path) -> None:
    objects = Counting(tmp_path / "objects")
    made(objects, tmp_path)

    async def ask() -> list[Path]:
        return await asyncio.gather(*(bases.unpacked(objects, tmp_path / "cache", "base:small") for _ in range(40)))

    assert len(set(asyncio.run(ask()))) == 1
    assert objects.fetched == 1


def test_an_open_that_is_cancelled_holds_nothing(tmp_path: Path) -> None:
    objects = Counting(tmp_path / "objects")
    made(objects, tmp_path)
    objects.gate = threading.Event()

    async def cancelled() -> None:
        asked = asyncio.create_task(bases.unpacked(objects, tmp_path / "cache", "base:small"))
        assert await asyncio.to_thread(objects.begun.wait, 20)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert objects.gate is not None
        objects.gate.set()
        bases.release(await bases.unpacked(objects, tmp_path / "cache", "base:small"))

    asyncio.run(cancelled())
    assert bases.trim(tmp_path / "cache", 0)


def test_what_a_killed_unpacking_left_goes_with_the_next(objects: Objects, tmp_path: Path) -> None:
    left = tmp_path / "cache/bases/unpacking-dead/base/root"
    left.mkdir(parents=True)
    made(objects, tmp_path)
    opened(objects, tmp_path, "base:small")
    assert not left.exists()


class Filling(DirectoryObjects):
    """A store beside which others fill the disk."""

    def get_file(self, ref: object, path: Path) -> None:
        super().get_file(ref, path)  # type: ignore[arg-type]
        with (path.parent.parent.parent / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_is_said_before_and_while_it_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Filling(tmp_path / "objects")
    small = tmp_path / "small-disk"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        made(objects, tmp_path, filler=100_000)
        with pytest.raises(SandboxUnavailable, match=r"is too small: base .* MiB free; free some"):
            asyncio.run(bases.unpacked(objects, small, "base:small"))
        monkeypatch.setattr(cache, "_RESERVE", 0)
        with pytest.raises(SandboxUnavailable, match="became full"):
            asyncio.run(bases.unpacked(objects, small, "base:small"))
        assert [path.name for path in (small / "bases").iterdir()] == ["lock"]
    finally:
        subprocess.run(["umount", small], check=True)
