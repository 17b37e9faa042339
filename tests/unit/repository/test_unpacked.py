"""Trees of a service's cache: each is unpacked once, and holds up no other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.run import Ref
from shared.environments.repository import trees
from shared.environments.repository.inside import files
from shared.environments.repository.kept import Kept
from shared.environments.repository.trees import File
from shared.environments.repository.unpacked import Unpacked
from shared.objects.directory import DirectoryObjects


class SlowObjects(DirectoryObjects):
    """A store that gives one object only when it is told to."""

    slow, open, reads = "", threading.Event(), 0

    def get(self, ref: Ref) -> bytes:
        self.reads += 1
        if ref.key == self.slow:
            assert self.open.wait(60)
        return super().get(ref)


def test_a_tree_that_is_slow_to_come_holds_up_no_other_and_is_read_once(tmp_path: Path) -> None:
    objects = SlowObjects(tmp_path / "objects")
    slow, quick = (trees.store_tree(objects, trees.encode({"x": File(text)})) for text in (b"slow", b"quick"))
    objects.slow = slow.key
    unpacked = Unpacked(objects, tmp_path / "cache")
    with ThreadPoolExecutor(3) as threads:
        try:
            waiting = [threads.submit(unpacked.folder, slow) for _ in range(2)]
            assert (threads.submit(unpacked.folder, quick).result(30) / "x").read_bytes() == b"quick"
            assert not any(one.done() for one in waiting)
        finally:
            objects.open.set()
        assert [(one.result(30) / "x").read_bytes() for one in waiting] == [b"slow"] * 2
    assert objects.reads == 2


def test_the_attempts_of_a_group_hash_their_tree_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = DirectoryObjects(tmp_path / "objects")
    tree = trees.store_tree(objects, trees.encode({"x": File(b"x")}))
    unpacked, hashed, together = Unpacked(objects, tmp_path / "cache"), [], threading.Barrier(4)

    def counted(folder: str) -> Iterator[tuple[str, list[Any]]]:
        hashed.append(folder)
        return entries(folder)

    entries = files.entries
    monkeypatch.setattr(files, "entries", counted)

    def attempt(_: int) -> object:
        together.wait(60)
        return unpacked.entries(tree)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(attempt, range(4)))
    assert len(hashed) == 1
    assert all(one is found[0] for one in found)


def test_kept_values_are_bounded_by_their_sizes_and_the_least_recent_goes_first() -> None:
    kept: Kept[str] = Kept(10, len)
    one, two, three = Path("1"), Path("2"), Path("3")
    for folder in (one, two, one, three):
        assert kept.get(folder, lambda: "xxxx") == "xxxx"
    assert kept.get(one, lambda: "new") == "xxxx"
    assert kept.get(two, lambda: "new") == "new"
    assert kept.get(one, lambda: "new") == "xxxx"
    assert kept.get(three, lambda: "new") == "new"
    assert kept.get(Path("4"), lambda: "a value of more than ten")
    assert kept.get(Path("4"), lambda: "new") == "a value of more than ten"


def test_a_tree_that_nobody_used_for_a_week_goes_when_another_comes(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path / "objects")
    old, used, new = (trees.store_tree(objects, trees.encode({"x": File(text)})) for text in (b"1", b"2", b"3"))
    first = Unpacked(objects, tmp_path / "cache")
    folders = [first.folder(tree) for tree in (old, used)]
    for folder in folders:
        os.utime(folder, (0, 0))
    first.folder(used)
    Unpacked(objects, tmp_path / "cache").folder(new)
    assert [folder.exists() for folder in folders] == [False, True]
    assert (first.folder(old) / "x").read_bytes() == b"1"  # made again
    assert (
        sorted(path.name[:8] for path in (tmp_path / "cache" / "trees").iterdir() if path.name[:8] == "sweeping") == []
    )
