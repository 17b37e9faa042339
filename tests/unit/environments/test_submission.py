"""Submissions: what differs between two trees, and that applying it gives the second, inside the folder alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.trajectory import Change
from shared.environments.repository.inside.files import entries
from shared.environments.repository.submission import (
    MAX_CHANGES,
    SubmissionError,
    apply,
    change_of,
    difference,
    objection,
)

NAMES = st.sampled_from(["a", "b", "c.py", "d"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
FILES = st.dictionaries(PATHS, st.tuples(st.binary(max_size=6) | st.text(max_size=6).map(str.encode), st.booleans()))


def without_files_as_folders(files: dict[str, tuple[bytes, bool]]) -> dict[str, tuple[bytes, bool]]:
    return {path: file for path, file in files.items() if not any(other.startswith(f"{path}/") for other in files)}


def lay(files: dict[str, tuple[bytes, bool]], folder: Path) -> None:
    for path, (data, executable) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
        (folder / path).chmod(0o755 if executable else 0o644)


@settings(max_examples=60, deadline=None)
@given(FILES.map(without_files_as_folders), FILES.map(without_files_as_folders))
def test_applying_the_difference_to_the_base_gives_the_tree(
    base: dict[str, tuple[bytes, bool]], then: dict[str, tuple[bytes, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        before, after, copy = Path(name, "before"), Path(name, "after"), Path(name, "copy")
        for folder, files in ((before, base), (after, then)):
            folder.mkdir()
            lay(files, folder)
        shutil.copytree(before, copy)
        now = dict(entries(str(after)))
        found = difference(dict(entries(str(before))), now)
        assert not found.refused
        changes = {path: Change() for path in found.deleted}
        changes |= {path: change_of((after / path).read_bytes(), now[path][2]) for path in found.changed}
        apply(changes, copy)
        assert dict(entries(str(copy))) == now
        if base == then:
            assert not changes


def test_links_devices_and_pipes_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    base = dict(entries(str(tmp_path)))
    os.symlink("/etc/passwd", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    found = difference(base, dict(entries(str(tmp_path))))
    assert found.changed == ()
    assert found.refused == {"link": "a link to /etc/passwd", "pipe": "it is a device, a pipe or a socket"}


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "a/../../x", "", "a//b", "./a", "a\0b", ".git/config", "x" * 300, "a/" * 200 + "a"]
)
def test_paths_that_leave_the_tree_are_refused(path: str, tmp_path: Path) -> None:
    assert objection({path: Change(text="x")})
    with pytest.raises(SubmissionError):
        apply({path: Change(text="x")}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_scan_goes_deeper_than_pythons_stack_in_the_order_of_names(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(1400):
        deep /= "b"
        deep.mkdir()
    for path in (deep / "x", tmp_path / "a", tmp_path / "c", tmp_path / "b" / "a"):
        path.write_text("x")
    assert list(dict(entries(str(tmp_path)))) == ["a", "b/a", "b/" * 1400 + "x", "c"]
    subprocess.run(["rm", "-r", str(tmp_path / "b")], check=True)  # pytest would remove it by recursion


def test_nothing_is_written_through_a_link_of_the_base(tmp_path: Path) -> None:
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir()
    tree.mkdir()
    (tree / "out").symlink_to(outside)
    (outside / "kept").write_text("kept")
    (tree / "file").symlink_to(outside / "kept")
    with pytest.raises(SubmissionError, match="found the link 'out' on the way"):
        apply({"out/x": Change(text="x")}, tree)
    apply({"out/kept": Change(), "file": Change(text="mine")}, tree)
    assert (outside / "kept").read_text() == "kept"
    assert (tree / "file").read_text() == "mine"
    assert sorted(path.name for path in outside.iterdir()) == ["kept"]


def test_too_many_and_contradictory_changes_are_refused() -> None:
    many = {f"f{number}": Change(text="") for number in range(MAX_CHANGES + 1)}
    assert objection(many) == f"found {MAX_CHANGES + 1} changed files; allowed: at most {MAX_CHANGES}"
    assert "at most 33554432" in str(objection({"a": Change(data=b"\xff" * ((32 << 20) + 1))}))
    assert "both text and data" in str(objection({"a": Change(text="", data=b"")}))
    assert "as a file and as a folder" in str(objection({"a": Change(text=""), "a/b": Change(text="")}))
