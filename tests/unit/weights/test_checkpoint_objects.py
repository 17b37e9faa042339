"""A checkpoint directory goes through the object store whole or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import pytest

from shared.objects import ObjectDamaged, ObjectMissing, connect
from shared.weights.checkpoint_objects import (
    CheckpointObjects,
    NotACheckpoint,
    NotUploaded,
    download_directory,
    read_checkpoint,
    upload_directory,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (path / "merges.txt").write_text("a b")
    return path


def names(path: Path) -> set[str]:
    return {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}


def test_a_directory_comes_back_file_by_file(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    ref = upload_directory(objects, "runs/r/base", directory)
    copy = download_directory(objects, ref, tmp_path / "cache" / ref.checksum)
    assert names(copy) == {"config.json", "model.safetensors", "merges.txt"}
    assert (copy / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    assert download_directory(objects, ref, copy) == copy


def test_what_a_training_leaves_beside_a_checkpoint_stays_where_it_is(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    (directory / "checkpoint-500").mkdir()
    (directory / ".git").mkdir()
    for name in (
        *("checkpoint-500/optimizer.pt", "checkpoint-500/model.safetensors", "checkpoint-500/config.json"),
        *(".git/config.json", ".hidden.json", "optimizer.pt", "pytorch_model.bin", "rng_state.pth", "losses.png"),
    ):
        (directory / name).write_text("not part of it")
    files = read_checkpoint(objects, upload_directory(objects, "runs/r/base", directory)).files
    assert files.keys() == {"config.json", "model.safetensors", "merges.txt"}
    assert sum(1 for _ in objects.list("runs/r/base/")) == 4


def test_named_chat_templates_belong_to_a_checkpoint(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    more = directory / "additional_chat_templates"
    more.mkdir()
    for name in ("tool_use.jinja", ".hidden.jinja", "notes.md", "config.json"):
        (more / name).write_text(name)
    for weights in (True, False):
        ref = upload_directory(objects, f"runs/{weights}/base", directory, weights=weights)
        copy = download_directory(objects, ref, tmp_path / "cache" / ref.checksum, weights=weights)
        assert names(copy / "additional_chat_templates") == {"tool_use.jinja"}


def test_without_weights_only_what_is_small_is_stored(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    ref = upload_directory(objects, "runs/r/base", directory, weights=False)
    assert names(download_directory(objects, ref, tmp_path / "small", weights=False)) == {"config.json", "merges.txt"}


def test_where_a_file_cannot_be_stored_it_is_told_which_and_why(tmp_path: Path, directory: Path) -> None:
    objects = connect(f"file:{tmp_path / 'objects'}")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a disk that is full
    try:
        with pytest.raises(NotUploaded, match=r"base: runs/r/base/model\.safetensors cannot be stored: File too large"):
            upload_directory(objects, "runs/r/base", directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(ObjectMissing):
        objects.head("runs/r/base/checkpoint.json")


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
