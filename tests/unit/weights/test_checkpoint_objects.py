"""A checkpoint directory goes through the object store whole or not at all."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.objects import ObjectDamaged, ObjectMissing, connect
from shared.weights.checkpoint_objects import (
    CheckpointObjects,
    NotACheckpoint,
    download_directory,
    read_checkpoint,
    upload_directory,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    (path / "extra").mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (path / "extra" / "card.md").write_text("a card")
    (path / ".lock").write_text("not part of it")
    return path


def test_a_directory_comes_back_file_by_file(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    ref = upload_directory(objects, "runs/r/base", directory)
    copy = download_directory(objects, ref, tmp_path / "cache" / ref.checksum)
    assert {p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()} == {
        "config.json",
        "model.safetensors",
        "extra/card.md",
    }
    assert (copy / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert download_directory(objects, ref, copy) == copy


def test_a_missing_or_damaged_file_leaves_nothing_half_written(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    ref = upload_directory(objects, "runs/r/base", directory)
    file = read_checkpoint(objects, ref).files["model.safetensors"]
    target = tmp_path / "cache" / "copy"
    objects.put(file.key, b"something else")
    with pytest.raises(ObjectDamaged):
        download_directory(objects, ref, target)
    objects.delete(file.key)
    with pytest.raises(ObjectMissing):
        download_directory(objects, ref, target)
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    (directory / "config.json").unlink()
    with pytest.raises(NotACheckpoint, match=r"config\.json"):
        upload_directory(objects, "runs/r/base", directory)
    evil = CheckpointObjects(files={"../../etc/passwd": objects.put("x", b"x")})
    ref = objects.put("evil.json", msgspec.json.encode(evil))
    with pytest.raises(NotACheckpoint, match="leaves the directory"):
        download_directory(objects, ref, tmp_path / "out")
