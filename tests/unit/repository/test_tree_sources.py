"""A source of a tree that lacks what it names is refused with what was found and the way out."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from shared.environments.repository.tree_sources import require_files, tree_at
from shared.environments.repository.trees import TreeError
from shared.objects.directory import DirectoryObjects
from shared.problems.kinds import Attach


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str]:
    """A repository of two commits, and the first one's name."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "a.py").write_text("a = 1\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    first = git(folder, "rev-parse", "HEAD")
    (folder / "a.py").write_text("a = 2\n")
    git(folder, "commit", "-qam", "two")
    return folder, first


def test_a_commit_that_a_shallow_clone_lacks_is_refused_with_how_to_get_it(
    repository: tuple[Path, str], tmp_path: Path
) -> None:
    folder, first = repository
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{folder}", "shallow")
    git(tmp_path, "clone", "-q", "--bare", "--depth", "1", f"file://{folder}", "bare")
    for name in ("shallow", "bare"):
        with pytest.raises(
            TreeError, match=rf"{name}: found no commit '{first}'.*shallow clone: `git fetch --unshallow`"
        ):
            tree_at(tmp_path / name, first)
    with pytest.raises(TreeError) as refused:
        tree_at(folder, "0" * 40)
    assert "--unshallow" not in str(refused.value)


def test_a_bundle_that_builds_on_other_commits_is_refused_with_their_names(
    repository: tuple[Path, str], tmp_path: Path
) -> None:
    folder, first = repository
    git(folder, "bundle", "create", "-q", str(tmp_path / "part.bundle"), f"{first}..main")
    with pytest.raises(TreeError, match=rf"part.bundle: .* does not hold: {first}; allowed: .*git bundle create"):
        tree_at(tmp_path / "part.bundle")


@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_compressed_tar_is_refused_by_its_name(cut: bool, tmp_path: Path) -> None:
    out, data = io.BytesIO(), os.urandom(20_000)
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("a.py")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    packed = bytearray(gzip.compress(out.getvalue()))
    packed[5_000:] = b"" if cut else bytes(400) + packed[5_400:]
    (tmp_path / "damaged.tar.gz").write_bytes(packed)
    with pytest.raises(TreeError, match=r"damaged\.tar\.gz: no tar archive, or damaged"):
        tree_at(tmp_path / "damaged.tar.gz")


def test_an_empty_tree_and_pointers_of_git_lfs_are_refused_where_problems_come_in(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "lfs").mkdir()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 12345\n"
    (tmp_path / "lfs" / "m.bin").write_text(pointer)
    incoming = Attach(DirectoryObjects(tmp_path / "store"), tmp_path)
    with pytest.raises(TreeError, match="empty: found no file in it; allowed: a tree with at least one"):
        incoming.tree("empty", "")
    with pytest.raises(TreeError, match=r"'m\.bin': is a pointer of Git LFS, one of 1.*git lfs pull"):
        incoming.tree("lfs", "")
    (tmp_path / "lfs" / "m.bin").write_text("about " + pointer)
    require_files(tmp_path, tree_at(tmp_path / "lfs"))


def test_a_tree_that_lacks_the_files_of_a_submodule_is_refused_with_the_way_out(
    repository: tuple[Path, str], tmp_path: Path
) -> None:
    folder, first = repository
    part = tmp_path / "part"
    git(tmp_path, "clone", "-q", str(folder), "part")
    git(folder, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(part), "vendor/part")
    git(folder, "commit", "-qm", "three")
    git(folder, "bundle", "create", "-q", str(tmp_path / "whole.bundle"), "main")
    git(tmp_path, "clone", "-q", str(folder), "clone")
    incoming = Attach(DirectoryObjects(tmp_path / "store"), tmp_path)
    for name, commit in (("repository", "main"), ("clone", ""), ("clone", "HEAD"), ("whole.bundle", "main")):
        with pytest.raises(
            TreeError, match=rf"{name}: 'vendor/part': is a submodule, one of 1.*submodule update --init"
        ):
            incoming.tree(name, commit)
    left_out: list[str] = []
    assert sorted(tree_at(folder, "main", left_out=left_out)) == [".gitmodules", "a.py"]
    assert left_out == ["vendor/part"]
    assert "vendor/part/a.py" in tree_at(folder)  # the work folder holds its files
    git(folder, "archive", "-o", str(tmp_path / "without.tar"), "main")
    assert sorted(tree_at(tmp_path / "without.tar")) == [".gitmodules", "a.py"]
    incoming.tree("repository", first)
