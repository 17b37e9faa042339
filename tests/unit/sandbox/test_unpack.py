"""Archives of bases: whatever stands in one, nothing is written outside the folder and no bound is passed."""

from __future__ import annotations

import os
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.archives import ArchiveError, zstd_pieces
from shared.sandbox.bases.unpack import unpack
from tests.unit.sandbox.rootfs_world import Member, folder, link, member, tar_of, unpacked_to

NAMES = st.sampled_from(
    ["a", "b", "c", "a/b", "b/c", "a/b/c", "..", "../x", "/abs", "a/../../x", ".", "./a", "a//b", ""]
)
TARGETS = st.sampled_from(["a", "b", "a/b", "..", "../..", "/", "/etc/passwd", "../outside", "outside", "/tmp"])
KINDS = st.sampled_from(
    [
        tarfile.REGTYPE,
        tarfile.DIRTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
        tarfile.FIFOTYPE,
    ]
)


@st.composite
def members(draw: st.DrawFn) -> Member:
    kind = draw(KINDS)
    data = draw(st.binary(max_size=40)) if kind == tarfile.REGTYPE else b""
    return member(draw(NAMES), data, kind, draw(TARGETS), draw(st.integers(0, 0o7777)), draw(st.integers(0, 2**33)))


def everything(place: Path) -> dict[str, bytes]:
    """Every path below a folder with what it holds, links unfollowed."""
    found = {}
    for at, folders, files in os.walk(place):
        for name in (*folders, *files):
            path = Path(at, name)
            mode = path.lstat().st_mode
            data = (
                os.readlink(path).encode() if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else b""
            )
            found[str(path.relative_to(place))] = data
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(members(), max_size=8))
def test_nothing_leaves_the_folder_and_no_device_or_special_mode_comes_out(found: list[Member]) -> None:
    with tempfile.TemporaryDirectory() as place:
        inside, outside = Path(place, "1", "inside"), Path(place, "outside")
        inside.mkdir(parents=True)
        outside.write_bytes(b"untouched")
        before = {path: data for path, data in everything(Path(place)).items() if not path.startswith("1/inside")}
        try:
            tally = unpacked_to(inside, tar_of(*found))
        except ArchiveError:
            tally = None
        after = everything(Path(place))
        assert {path: data for path, data in after.items() if not path.startswith("1/inside")} == before
        for path in [path for path in after if path.startswith("1/inside/")]:
            mode = Path(place, path).lstat().st_mode
            assert stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
            assert stat.S_ISLNK(mode) or stat.S_IMODE(mode) in (0o755, 0o644)
        if tally:
            assert tally.files == len([path for path in after if path.startswith("1/inside/")])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 300)), max_size=6),
    st.integers(0, 600),
    st.integers(0, 6),
)
def test_no_bound_is_passed_on_the_disk(files: list[tuple[str, int]], size: int, count: int) -> None:
    data = tar_of(*(member(f"{n}{name}", b"x" * length) for n, (name, length) in enumerate(files)))
    fits = sum(length for _, length in files) <= size and len(files) <= count
    with tempfile.TemporaryDirectory() as place:
        if fits:
            unpacked_to(Path(place), data, size=size, files=count)
        else:
            with pytest.raises(ArchiveError):
                unpacked_to(Path(place), data, size=size, files=count)
        written = everything(Path(place))
        assert len(written) <= count
        assert sum(map(len, written.values())) <= size


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=600), st.data())
def test_damage_is_an_archive_error(noise: bytes, data: st.DataObject) -> None:
    good = tar_of(folder("a"), member("a/b", b"x" * 700, mode=0o755), link("c", "a/b"))
    place = data.draw(st.integers(0, len(good)))
    damaged = data.draw(st.sampled_from([noise, good[:place], good[:place] + noise + good[place + len(noise) :]]))
    with tempfile.TemporaryDirectory() as folder_:
        try:
            unpacked_to(Path(folder_), damaged)
        except ArchiveError:
            return


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([member("../x")], "'..'"),
        ([member("/etc/x")], "absolute"),
        ([link("a", "/etc"), member("a/x")], "is a file or a link"),
        ([member("a"), member("a/b")], "is a file or a link"),
        ([link("a", "/etc/passwd"), member("b", kind=tarfile.LNKTYPE, link="a")], "hard link"),
        ([member("b", kind=tarfile.LNKTYPE, link="/etc/passwd")], "hard link"),
        ([member("a"), member("a")], "twice"),
        ([member("null", kind=tarfile.CHRTYPE)], "device"),
        ([member("pipe", kind=tarfile.FIFOTYPE)], "pipe"),
        ([link("a", "x" * 5000)], "links to a path of 5000 bytes"),
        ([member("/".join("d" * 201))], "too deep"),
        ([member("n" * 300)], "too long"),
    ],
)
def test_what_is_refused_and_why(tmp_path: Path, found: list[Member], why: str) -> None:
    with pytest.raises(ArchiveError, match=why):
        unpacked_to(tmp_path, tar_of(*found))


def test_links_out_are_kept_as_links_and_setuid_is_gone(tmp_path: Path) -> None:
    data = tar_of(
        folder("bin"), member("bin/su", b"#!", mode=0o4755), member("bin/su2", kind=tarfile.LNKTYPE, link="bin/su"),
        link("etc", "/etc"), member("implicit/below", b"1", mtime=77),
    )  # fmt: skip
    tally = unpacked_to(tmp_path, data)
    assert (tally.size, tally.files) == (3, 6)
    assert (tmp_path / "bin/su").stat().st_mode & 0o7777 == 0o755
    assert (tmp_path / "bin/su").samefile(tmp_path / "bin/su2")
    assert os.readlink(tmp_path / "etc") == "/etc"
    assert (tmp_path / "implicit/below").stat().st_mtime == 77


def test_a_huge_header_is_refused_unread(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a")
    info.pax_headers = {"comment": "x" * 100_000}
    with pytest.raises(ArchiveError, match="header of"):
        unpacked_to(tmp_path, tar_of((info, b"")))


def test_a_bomb_is_noticed_before_it_has_unfolded(tmp_path: Path) -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor(level=19).compress(tar_of(member("a", b"\0" * (64 << 20))))
    assert len(bomb) < 20_000
    with pytest.raises(ArchiveError, match="more than 1000 bytes"):
        unpack(zstd_pieces([bomb]), tmp_path, size=1000, files=10)
    assert not (tmp_path / "a").exists() or not (tmp_path / "a").stat().st_size
