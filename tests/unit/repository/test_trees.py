"""Source trees as data: the same tree gives the same bytes, and nothing leaves the folder it is written to."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.environments.repository import trees
from shared.environments.repository.tree_sources import tree_at
from shared.environments.repository.trees import File, Link, TreeError
from shared.objects.directory import DirectoryObjects

NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="/"), min_size=1, max_size=8
).filter(lambda name: trees.wrong_path(name) is None)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
ENTRIES = st.builds(File, st.binary(max_size=64), st.booleans()) | st.builds(
    Link, st.sampled_from(["a", "b/c", ".", "x"])
)


def _valid(tree: dict[str, File | Link]) -> dict[str, File | Link]:
    """The largest part of a random tree that is one."""
    kept: dict[str, File | Link] = {}
    for path, entry in tree.items():
        try:
            trees.check(kept | {path: entry})
        except TreeError:
            continue
        kept[path] = entry
    return kept


TREES = st.dictionaries(PATHS, ENTRIES, max_size=8).map(_valid)


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return packed.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@settings(max_examples=60)
@given(TREES)
def test_a_tree_survives_its_archive_and_a_folder(tree: dict[str, File | Link]) -> None:
    data = trees.encode(tree)
    assert trees.decode(data) == tree
    assert trees.encode(dict(reversed(tree.items()))) == data
    with tempfile.TemporaryDirectory() as folder:
        trees.unpack_tree(data, Path(folder, "tree"))
        assert trees.from_folder(Path(folder, "tree")) == tree
        assert trees.pack_tree(Path(folder, "tree")) == data


@settings(max_examples=150)
@given(st.binary(max_size=400), st.data())
def test_damage_is_named_and_never_crashes(noise: bytes, data: st.DataObject) -> None:
    good = trees.encode({"a/b.py": File(b"x = 1\n" * 30), "run": File(b"#!/bin/sh\n", True)})
    place = data.draw(st.integers(0, len(good)))
    damaged = data.draw(st.sampled_from([noise, good[:place], good[:place] + noise + good[place + len(noise) :]]))
    tar = zstandard.ZstdDecompressor().decompressobj().decompress(good)
    for read, archive in (
        (trees.decode, damaged),
        (lambda it: trees.from_tar(iter([it])), tar[:place] + noise + tar[place:]),
    ):
        with contextlib.suppress(TreeError):
            read(archive)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"../a": File(b"")}, ["'../a'", "'..'"]),
        ({"/etc/passwd": File(b"")}, ["'/etc/passwd'", "is absolute"]),
        ({"a//b": File(b"")}, ["'a//b'", "empty"]),
        ({"a\nb": File(b"")}, ["control character"]),
        ({"src/.git/config": File(b"")}, ["'src/.git/config'", "history (.git)"]),
        ({".GIT/hooks/x": File(b"")}, ["history"]),
        ({"a": File(b""), "a/b": File(b"")}, ["'a/b'", "'a' is a file or a link"]),
        ({"Read.md": File(b""), "read.md": File(b"")}, ["only in case"]),
        ({"Doc/a": File(b""), "doc/b": File(b"")}, ["'doc'", "'Doc'", "only in case"]),
        ({"a": Link("/etc/passwd")}, ["'a'", "'/etc/passwd'", "absolute"]),
        ({"a": Link("../b")}, ["'a'", "leaves the tree"]),
        ({"a/b": Link("../../b")}, ["'a/b'", "leaves the tree"]),
        # Each looks as if it stayed inside; the second goes out by the first.
        ({"deep/er/root": Link("../.."), "out": Link("deep/er/root/../x")}, ["'out'", "leaves the tree"]),
        ({"a": Link("b"), "b": Link("a")}, ["circle"]),
        ({"a": Link("")}, ["empty"]),
        ({"x" * 256: File(b"")}, ["too long"]),
        ({"a/" * 200 + "a": File(b"")}, ["too deep", "at most 200"]),
    ],
)
def test_a_tree_that_cannot_be_is_refused_by_its_path(
    tree: dict[str, File | Link], words: list[str], tmp_path: Path
) -> None:
    for attempt in (lambda: trees.encode(tree), lambda: trees.write(tree, tmp_path / "into")):
        with pytest.raises(TreeError) as refused:
            attempt()
        assert all(word in str(refused.value) for word in words), refused.value
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (tar_of((member("a/../../b"), b"")), ["'a/../../b'"]),
        (tar_of((member("a"), b"1"), (member("./a"), b"2")), ["'a'", "twice"]),
        (tar_of((member("dev", tarfile.CHRTYPE), b"")), ["'dev'", "device"]),
        (tar_of((member("pipe", tarfile.FIFOTYPE), b"")), ["'pipe'"]),
        (tar_of((member("hard", tarfile.LNKTYPE, "/etc/passwd"), b"")), ["'hard'", "hard link"]),
        (tar_of((member("link", tarfile.SYMTYPE, "../x"), b"")), ["'link'", "leaves the tree"]),
        (tar_of((member("a"), b"1"))[:512], ["damaged"]),
        (b"no tar at all" * 100, ["no tar archive"]),
    ],
)
def test_an_archive_that_cannot_be_taken_is_refused(archive: bytes, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(TreeError) as refused:
        trees.unpack_tree(zstandard.ZstdCompressor(write_checksum=True).compress(archive), tmp_path / "into")
    assert all(word in str(refused.value) for word in words), refused.value
    assert not (tmp_path / "into").exists()


def test_a_bomb_is_refused_before_it_unfolds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(trees, "MAX_FILES", 10)
    zeros = zstandard.ZstdCompressor().compress(tar_of((member("a"), bytes(4 << 20))))
    assert len(zeros) < 4096
    with pytest.raises(TreeError, match="more than 1048576 bytes"):
        trees.decode(zeros)
    many = tar_of(*((member(f"f{number}"), b"") for number in range(11)))
    with pytest.raises(TreeError, match="more than 10 files"):
        trees.decode(zstandard.ZstdCompressor().compress(many))


def test_a_folder_is_packed_without_history_and_without_what_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    (folder / ".git/refs").mkdir(parents=True)
    (folder / ".git/HEAD").write_text("future")
    (folder / "sub").mkdir()
    (folder / "sub/.git").write_text("gitdir: ../.git/modules/sub")
    (folder / "sub/run.sh").write_text("#!/bin/sh\n")
    (folder / "sub/run.sh").chmod(0o4711)
    (folder / "link").symlink_to("sub/run.sh")
    assert trees.from_folder(folder) == {"sub/run.sh": File(b"#!/bin/sh\n", True), "link": Link("sub/run.sh")}
    os.mkfifo(folder / "sub/pipe")
    with pytest.raises(TreeError, match=r"'sub/pipe': is a device, a socket or a pipe"):
        trees.pack_tree(folder)


def test_a_tree_is_never_written_over_another(tmp_path: Path) -> None:
    (tmp_path / "evil").symlink_to("/tmp")
    with pytest.raises(TreeError, match="is not empty"):
        trees.unpack_tree(trees.encode({"evil/x": File(b"")}), tmp_path)


def test_equal_trees_are_one_object(tmp_path: Path) -> None:
    objects = DirectoryObjects(tmp_path)
    data = trees.encode({"a.py": File("x = 'ä'\n".encode()), "b": File(b"\xff")})
    ref = trees.store_tree(objects, data)
    assert trees.store_tree(objects, data) == ref == objects.head(ref.key)
    assert ref.key == f"trees/{ref.checksum}.tar.zst"
    assert objects.get(ref) == data
    assert trees.read_files(data, ["a.py", "b", "c"]) == {"a.py": "x = 'ä'\n"}


# --- where trees come from -------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> str:
    command = [
        "git",
        "-C",
        str(folder),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        "-c",
        "commit.gpgsign=false",
    ]
    return subprocess.run([*command, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, str, str]:
    """A git repository and its two commits, the broken and the repaired state."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / ".gitattributes").write_text("*.py text eol=crlf ident\nleft.txt export-ignore\n")
    (folder / "left.txt").write_text("kept\n")
    (folder / "code.py").write_text("# $Id$\nx = 1\n")
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("code.py")
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "broken")
    before = git(folder, "rev-parse", "HEAD")
    (folder / "code.py").write_text("# $Id$\nx = 2\n")
    git(folder, "commit", "--quiet", "-am", "repaired")
    return folder, before, git(folder, "rev-parse", "HEAD")


def test_a_commit_is_read_byte_for_byte_from_clone_bare_clone_and_bundle(
    repository: tuple[Path, str, str], tmp_path: Path
) -> None:
    folder, before, after = repository
    git(folder, "bundle", "create", str(tmp_path / "all.bundle"), "--all")
    git(folder, "clone", "--quiet", "--bare", str(folder), str(tmp_path / "bare.git"))
    for source in (folder, tmp_path / "all.bundle", tmp_path / "bare.git"):
        tree = tree_at(source, before)
        assert sorted(tree) == [".gitattributes", "code.py", "left.txt", "link", "run"]
        assert tree["code.py"] == File(b"# $Id$\nx = 1\n")
        assert tree["link"] == Link("code.py")
        assert tree["run"] == File(b"#!/bin/sh\n", True)
        assert tree_at(source, after[:10])["code.py"] == tree_at(source)["code.py"] == File(b"# $Id$\nx = 2\n")
        with pytest.raises(TreeError, match="found no commit 'nowhere'"):
            tree_at(source, "nowhere")
    (folder / "code.py").write_text("x = 3\n")
    assert tree_at(folder)["code.py"] == File(b"x = 3\n")  # without a commit, the folder as it stands


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_is_read_without_history(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "tree"
    (folder / ".git").mkdir(parents=True)
    (folder / ".git/HEAD").write_text("future")
    (folder / "a.py").write_text("x = 1\n")
    os.link(folder / "a.py", folder / "b.py")
    with tarfile.open(tmp_path / "archive", mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, ".")
    assert tree_at(tmp_path / "archive") == {"a.py": File(b"x = 1\n"), "b.py": File(b"x = 1\n")}
    packed = tmp_path / "tree.tar.zst"
    packed.write_bytes(trees.encode({"a.py": File(b"x = 1\n")}))
    assert tree_at(packed) == {"a.py": File(b"x = 1\n")}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04", ["no archive", ".tar.gz"]),
        (b"# v2 git bundle\n", ["no commit 'HEAD'"]),
        (b"\x1f\x8b\x08", ["damaged"]),
    ],
)
def test_a_source_that_is_no_tree_is_refused_with_what_is_allowed(
    tmp_path: Path, data: bytes, words: list[str]
) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    with pytest.raises(TreeError) as refused:
        tree_at(path)
    assert str(path) in str(refused.value)
    assert all(word in str(refused.value) for word in words)
    with pytest.raises(TreeError, match="cannot be read"):
        tree_at(tmp_path / "missing")
