"""The pure parts of sandboxes that live on: frames, the text for a shell, kept output, differences, and where cgroups are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sandbox import archives, cgroups, folders
from shared.sandbox.archives import Line
from shared.sandbox.contract import Caps
from shared.sandbox.inside import frames, shell

HEADS = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(), st.text(max_size=20)), max_size=4)


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), HEADS, st.binary(max_size=200)), max_size=5), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    messages: list[tuple[int, dict[str, object], bytes]], data: st.DataObject
) -> None:
    stream = b"".join(frames.message(frames.REQUEST, number, head, blob) for number, head, blob in messages)
    splitter, found = frames.Splitter(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += [(number, *frames.parse(payload)) for _, number, payload in splitter.feed(stream[:size])]
        stream = stream[size:]
    assert found == messages


@given(st.binary(max_size=100))
def test_a_stream_of_anything_gives_frames_or_is_broken(stream: bytes) -> None:
    try:
        for _, _, payload in frames.Splitter().feed(stream):
            frames.parse(payload)
    except frames.BrokenChannel:
        pass


@settings(max_examples=15, deadline=None)
@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=60))
def test_any_text_is_one_word_for_a_shell(text: str) -> None:
    done = subprocess.run(["/bin/sh", "-c", f"printf %s {shell.quoted(text)}"], capture_output=True, check=True)
    assert done.stdout.decode() == text


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(2, 40))
def test_the_first_and_last_bytes_of_an_output_are_kept(parts: list[bytes], most: int) -> None:
    kept, whole = shell.Kept(most), b"".join(parts)
    for part in parts:
        kept.add(part)
    half = most // 2
    if len(whole) <= 2 * half:
        assert (kept.whole(), kept.lost) == (whole, 0)
    else:
        assert kept.whole().startswith(whole[:half])
        assert kept.whole().endswith(whole[-half:])
        assert kept.lost == len(whole) - 2 * half


def test_the_code_of_a_script_stands_behind_its_own_mark() -> None:
    assert shell.code_after("abc", b"old 1\nabc 17\n") == 17
    assert shell.code_after("abc", b"abc 17") is None
    assert shell.code_after("abc", b"xyz 1\n") is None


def test_remarks_of_an_interactive_shell_are_no_errors() -> None:
    errors = b"[1] 12\nbash: [7: 1 (255)] tcsetattr: Inappropriate ioctl for device\nreal\nexit\n"
    assert shell.without_noise(errors, ended=True) == b"real\n"
    assert shell.without_noise(b"real\nexit\n", ended=False) == b"real\nexit\n"


def test_a_difference_tells_written_deleted_and_refused() -> None:
    same = Line("same", "file", 0o644, 1, "a")
    base = [
        same,
        Line("mode", "file", 0o644, 1, "b"),
        Line("gone", "file", 0o644, 1, "c"),
        Line("link", "link", 0o777, 0, "x"),
    ]
    now = [
        same,
        Line("mode", "file", 0o755, 1, "b"),
        Line("new", "file", 0o644, 1, "d"),
        Line("huge", "file", 0o644, 101, ""),
        Line("link", "link", 0o777, 0, "y"),
        Line("dir", "folder", 0o755, 0, ""),
        Line("pipe", "device", 0o644, 0, ""),
    ]
    written, deleted, refused = archives.difference(base, now, Caps(size=100))
    assert written == ["mode", "new"]
    assert deleted == ("gone",)
    assert set(refused) == {"huge", "link", "pipe"}


MOUNTS = """30 1 0:26 / {root}/memory rw - cgroup cgroup rw,memory
31 1 0:27 / {root}/pids rw - cgroup cgroup rw,pids
32 1 0:28 {inner} {root}/unified rw - cgroup2 cgroup2 rw
"""
MEMBERSHIP = "4:memory:/a\n8:pids:/\n1:cpu:/\n0::/b\n"


@pytest.mark.parametrize("inner", ["/", "/b"])
def test_groups_lie_below_the_own_cgroup(tmp_path: Path, inner: str) -> None:
    (tmp_path / "memory/a").mkdir(parents=True)
    (tmp_path / "pids").mkdir()
    mounts = MOUNTS.format(root=tmp_path, inner=inner)
    assert cgroups.find(MEMBERSHIP, mounts) == cgroups.Place(1, tmp_path / "memory/a", tmp_path / "pids")
    own = tmp_path / "unified" / ("b" if inner == "/" else "")
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text("cpu memory pids\n")
    (own / "cgroup.subtree_control").write_text("memory pids\n")
    assert cgroups.find(MEMBERSHIP, mounts) == cgroups.Place(2, own, own)
    assert cgroups.find("0::/\n", "") == cgroups.NOWHERE
    assert cgroups.NOWHERE.memory_by == "watchdog"


def test_a_copy_follows_no_link_and_keeps_holes_modes_and_closed_folders(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source / "closed", target):
        folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (source / "link").symlink_to(tmp_path / "secret")
    (source / "closed/file").write_bytes(b"x" * 10)
    (source / "closed").chmod(0)
    os.mkfifo(source / "pipe")
    with open(source / "sparse", "wb") as file:
        file.truncate(1 << 40)
    folders.copy(source, target, None)
    assert (target / "link").is_symlink()
    assert (target / "sparse").stat().st_size == 1 << 40
    assert folders.used(target) < 1 << 20
    assert (target / "closed").stat().st_mode & 0o777 == 0
    (target / "closed").chmod(0o700)
    assert (target / "closed/file").read_bytes() == b"x" * 10
    folders.remove(target)
    folders.remove(source)
    assert not target.exists()
    assert not source.exists()
    assert (tmp_path / "secret").read_text() == "secret"
