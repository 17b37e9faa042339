"""Images that unfold to too much, and disks that they fill: refused while they do, with nothing left."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from etude import sandbox as command
from shared.objects.directory import DirectoryObjects
from shared.sandbox.bases import BaseRefused, images, layers, make
from shared.sandbox.bases.make import Source
from tests.unit.sandbox.rootfs_world import member, tar_of

MOST = 8 << 20


def oci(place: Path, layer: bytes, count: int) -> Path:
    """Write an image that names one layer `count` times."""
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    manifest = {"config": blob(b"{}"), "layers": [blob(layer)] * count}
    (place / "index.json").write_text(json.dumps({"manifests": [blob(json.dumps(manifest).encode())]}))
    (place / "oci-layout").write_text("{}")
    return place


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    place = tmp_path / "layers"
    place.mkdir()
    return place


@pytest.mark.parametrize("count", [1, 2, 40])
def test_layers_of_too_many_bytes_together(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(layers, "MOST", MOST)
    bomb = gzip.compress(tar_of(member("zeros", bytes((9 << 20) // count))))
    assert len(bomb) < 20_000
    with pytest.raises(BaseRefused, match=f"its layers have more than {MOST} bytes; allowed: no more"):
        images.read(oci(tmp_path / "image", bomb, count), scratch)
    assert sum(path.stat().st_size for path in scratch.iterdir()) <= MOST + (1 << 20)


@pytest.mark.parametrize("count", [1, 2, 40])
def test_layers_of_too_many_files_together(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(layers, "MAX_FILES", 100)
    layer = tar_of(*(member(f"f{number}") for number in range(1 + 100 // count)))
    with pytest.raises(BaseRefused, match="its layers have more than 100 files; allowed: no more"):
        images.read(oci(tmp_path / "image", layer, count), scratch)


def test_of_a_bomb_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST", MOST)
    image, work = tmp_path / "image.tar.gz", tmp_path / "work"
    image.write_bytes(gzip.compress(tar_of(member("zeros", bytes(9 << 20)))))
    work.mkdir()
    with pytest.raises(BaseRefused, match="more than"):
        make.make(DirectoryObjects(tmp_path / "objects"), "bomb", Source(image=image), work)
    assert list(work.iterdir()) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [image]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small-disk"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_on_a_full_disk_a_base_is_not_made_and_the_way_out_is_told(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = tmp_path / "image.tar.gz"
    image.write_bytes(gzip.compress(tar_of(member("zeros", bytes(9 << 20)))))
    with pytest.raises(typer.Exit), command._refusals("make"):
        make.make(DirectoryObjects(tmp_path / "objects"), "large", Source(image=image), small)
    said = capsys.readouterr()
    assert "No space left on device" in said.out + said.err
    assert "free some, or name a folder on another disk (TMPDIR" in said.out + said.err
    assert list(small.iterdir()) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [image]
