"""Imported checkpoints keep their names, and exports are refused before the work or whole."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from etude.exchange import NotExchanged, export_run, export_stored
from etude.exchange.errors import located
from etude.exchange.store import store, stored
from shared.contracts.run import Ref
from shared.model.fields import UnknownModel
from shared.objects.directory import DirectoryObjects
from shared.weights.checkpoint_objects import checksums_of, download_directory

RUN = "r-20260101T000000-abcd"


class Interrupted(DirectoryObjects):
    """A store in which another import finishes just before the first file of this one is stored."""

    other: Path | None = None

    def put_file(self, key: str, path: Path) -> Ref:
        other, self.other = self.other, None
        if other is not None:
            store(self, "mine", other)
        return super().put_file(key, path)


def files(folder: Path, weights: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


@pytest.mark.parametrize("same", [False, True])
def test_of_two_imports_at_once_one_gets_the_name_and_its_files_stay_whole(tmp_path: Path, same: bool) -> None:
    objects = Interrupted(tmp_path / "objects")
    first, second = files(tmp_path / "a", b"1"), files(tmp_path / "b", b"1" if same else b"2")
    objects.other = second
    if same:
        assert store(objects, "mine", first) == (stored(objects, "mine"), False)
    else:
        with pytest.raises(NotExchanged, match="another checkpoint"):
            store(objects, "mine", first)
    whole = download_directory(objects, stored(objects, "mine"), tmp_path / "whole")
    assert checksums_of(whole) == checksums_of(second)


def test_a_refusal_names_the_place_once_even_where_the_text_begins_like_the_folder() -> None:
    folder = Path("config")  # a relative folder, as a user may give it
    assert str(located(folder, UnknownModel("config.json: x is 1"))) == "config: config.json: x is 1"
    assert str(located(folder, UnknownModel("not JSON", folder / "config.json"))) == "config/config.json: not JSON"


def test_checksums_hold_no_file_in_memory(tmp_path: Path) -> None:
    folder = files(tmp_path / "a", b"")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        checksums_of(folder)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", [b"[]", b"\xff", b""])
def test_an_export_of_a_damaged_run_names_the_object(tmp_path: Path, damage: bytes) -> None:
    objects = DirectoryObjects(tmp_path / "objects")
    objects.put(f"runs/{RUN}/config.json", damage)
    with pytest.raises(NotExchanged, match=rf"runs/{RUN}/config.json of the object store cannot be read"):
        export_run(objects, RUN, tmp_path / "out")


@pytest.mark.parametrize("damage", ["lost", "changed", "manifest"])
def test_an_export_of_a_damaged_checkpoint_names_it_and_leaves_nothing(tmp_path: Path, damage: str) -> None:
    objects = DirectoryObjects(tmp_path / "objects")
    store(objects, "mine", files(tmp_path / "a", b"1"))
    if damage == "manifest":
        objects.put("checkpoints/mine/checkpoint.json", b"[]")
    else:
        key = next(key for key in objects.list("checkpoints/mine/") if key.endswith(".safetensors"))
        objects.delete(key) if damage == "lost" else objects.put(key, b"2")
    with pytest.raises(NotExchanged, match=r"checkpoints/mine/checkpoint\.json: cannot be read"):
        export_stored(objects, "mine", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Watched(DirectoryObjects):
    """A store that remembers the files that it wrote for others."""

    written: set[int] = set()  # noqa: RUF012

    def get_file(self, ref: Ref, path: Path) -> None:
        super().get_file(ref, path)
        self.written.add(path.stat().st_ino)


def test_an_export_writes_the_weights_once(tmp_path: Path) -> None:
    objects = Watched(tmp_path / "objects")
    store(objects, "mine", files(tmp_path / "a", b"1"))
    out = export_stored(objects, "mine", tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == b"1"
    assert (out / "model.safetensors").stat().st_ino in objects.written
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]
