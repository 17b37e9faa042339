"""Root file systems as data: equal files give equal bytes, layers are laid as Docker does, and nothing of the host gets in."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import py_compile
import socket
import tarfile
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sandbox.bases import BaseRefused, images, rootfs
from shared.sandbox.bases.cleaning import clean
from shared.sandbox.bases.rootfs import File, Folder, Link, from_folder, machine_of, pack, walk
from tests.unit.sandbox.rootfs_world import Member, folder, host_programs, link, member, tar_of, unpacked_to

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..") and not name.startswith(".wh.")
)


def packed(root: Folder) -> bytes:
    into = io.BytesIO()
    pack(root, into)
    return into.getvalue()


def read_tar(data: bytes, place: Path) -> images.Image:
    place.mkdir(parents=True, exist_ok=True)
    (place / "in.tar").write_bytes(data)
    (place / "layers").mkdir()
    return images.read(place / "in.tar", place / "layers")


def texts(root: Folder) -> dict[str, str]:
    """Files and links of a root; folders that hold nothing end in a slash."""
    shown = {}
    for path, node in walk(root):
        if isinstance(node, File):
            shown[path] = rootfs.content(node, 1000).decode()
        elif isinstance(node, Link):
            shown[path] = f"-> {node.target}"
        elif not node.children:
            shown[f"{path}/"] = ""
    return shown


@settings(max_examples=60)
@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=50), max_size=8))
def test_a_root_survives_its_archive_and_equal_files_give_equal_bytes(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        first, second = Path(place, "1"), Path(place, "2")
        first.mkdir()
        second.mkdir()
        for path, data in files.items():
            try:
                (first / path).parent.mkdir(parents=True, exist_ok=True)
                (first / path).write_bytes(data)
                os.utime(first / path, (len(data), 7))
            except OSError:  # one name is a folder and a file
                continue
        data = packed(from_folder(first).root)
        tally = unpacked_to(second, data)
        assert packed(from_folder(second).root) == data
        assert tally.files == len(list(walk(from_folder(first).root)))


def test_hard_links_stay_links_and_special_files_are_left_out_and_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "b").write_bytes(b"twice")
    os.link(root / "b", root / "a")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.open(root, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{here}/socket")  # the whole path may be too long for one
        os.close(here)
    (root / "su").write_bytes(b"")
    (root / "su").chmod(0o4755)
    read = from_folder(root)
    assert sorted(read.left_out) == ["pipe", "socket"]
    into = tmp_path / "into"
    into.mkdir()
    assert unpacked_to(into, packed(read.root)).size == 5
    assert (into / "a").samefile(into / "b")
    assert (into / "su").stat().st_mode & 0o7777 == 0o755


def test_a_source_keeps_the_time_that_its_compiled_form_names(tmp_path: Path) -> None:
    for number, time in enumerate((1_600_000_000, 1_700_000_000)):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "m.py").write_text("x = 1\n")
        (root / "other").write_text("x")
        os.utime(root / "m.py", (time, time))
        os.utime(root / "other", (time, time))
        py_compile.compile(str(root / "m.py"), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
        into = tmp_path / f"into-{number}"
        into.mkdir()
        unpacked_to(into, packed(from_folder(root).root))
        assert (into / "m.py").stat().st_mtime == time
        assert (into / "other").stat().st_mtime == rootfs.TIME
    os.utime(tmp_path / "0/m.py", (5, 5))  # not what the compiled form says: it is out of date either way
    assert b"m.py" in packed(from_folder(tmp_path / "0").root)


def test_what_belongs_to_one_machine_goes_and_what_a_sandbox_needs_comes(tmp_path: Path) -> None:
    gone = (
        "etc/machine-id",
        "etc/ssh/ssh_host_rsa_key",
        "etc/shadow",
        "var/lib/apt/lists/x",
        "var/log/a/b.log",
        "tmp/x",
    )
    gone += ("root/.ssh/id_rsa", "home/me/.ssh/key", "dev/x", "var/lib/dpkg/status-old")
    stay = (
        "etc/passwd",
        "etc/ssh/ssh_config",
        "var/lib/dpkg/status",
        "home/me/.profile",
        "usr/tmp/x",
        "etc/hosts.allow",
    )
    members = [member(path, path.encode()) for path in (*gone, *stay)]
    image = read_tar(tar_of(*members, link("run", "/etc")), tmp_path)
    clean(image.root)
    found = texts(image.root)
    assert not set(gone) & set(found)
    assert set(stay) <= set(found)
    assert {"dev/", "proc/", "sys/", "tmp/", "run/", "workspace/", "var/log/a/"} <= set(found)
    assert "localhost" in found["etc/hosts"]


LOWER = (folder("usr"), folder("usr/bin"), member("usr/bin/sh", b"old sh"), link("bin", "usr/bin"), folder("d"), folder("d/e"),
         member("d/e/1", b"1"), member("d/2", b"2"), member("gone", b"gone"), member("f", b"file"))  # fmt: skip
UPPER = (
    member(".wh.gone"),
    member("bin/new", b"through a link"),
    member("d/3", b"3"),
    member("d/.wh..wh..opq"),
    member("hard", kind=tarfile.LNKTYPE, link="d/3"),
    member("old", kind=tarfile.LNKTYPE, link="bin/sh"),
    member("usr/bin/.wh.sh"),
    folder("f"),
    member("f/below", b"a folder now"),
    member(".wh..wh.plnk"),
    member("dev/null", kind=tarfile.CHRTYPE),
)
TOGETHER = {
    "bin": "-> usr/bin",
    "usr/bin/new": "through a link",
    "d/3": "3",
    "hard": "3",
    "old": "old sh",
    "f/below": "a folder now",
}


def saved(*layers: bytes, architecture: str = ARCHITECTURE, count: int = 1) -> bytes:
    config = json.dumps({"architecture": architecture, "config": {"Env": ["PATH=/x/bin:/bin", "bad name=1"]}}).encode()
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = json.dumps([{"Config": "c.json", "RepoTags": ["x:1"], "Layers": names}] * count).encode()
    of = [member(name, data) for name, data in zip(names, layers, strict=True)]
    return tar_of(member("manifest.json", manifest), member("c.json", config), *of)


def oci(place: Path, *layers: bytes, architecture: str = ARCHITECTURE, damage: bool = False) -> Path:
    blobs = place / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data + b" " * damage)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    config = blob(json.dumps({"architecture": architecture}).encode())
    manifest = blob(json.dumps({"config": config, "layers": [blob(data) for data in layers]}).encode())
    other = {"digest": f"sha256:{'0' * 64}", "platform": {"os": "linux", "architecture": "s390x"}}
    mine = {**manifest, "platform": {"os": "linux", "architecture": architecture}}
    index = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        **blob(json.dumps({"manifests": [other, mine]}).encode()),
    }
    (place / "index.json").write_text(json.dumps({"manifests": [index]}))
    (place / "oci-layout").write_text("{}")
    return place


def test_layers_of_docker_save_are_laid_over_each_other(tmp_path: Path) -> None:
    image = read_tar(saved(tar_of(*LOWER), tar_of(*UPPER)), tmp_path)
    assert texts(image.root) == TOGETHER
    assert image.environment == {"PATH": "/x/bin:/bin"}
    assert list(image.left_out) == ["dev/null"]
    odd = read_tar(tar_of(link("l", "x" * 5000), member("n" * 300), link("ok", "/x")), tmp_path / "odd")
    assert (list(odd.left_out), texts(odd.root)) == (["l", "n" * 300], {"ok": "-> /x"})
    into = tmp_path / "into"
    into.mkdir()
    unpacked_to(into, packed(image.root))
    assert (into / "hard").samefile(into / "d/3")


def test_an_oci_layout_as_a_folder_and_as_a_tar(tmp_path: Path) -> None:
    place = oci(tmp_path / "oci", gzip.compress(tar_of(*LOWER)), zstandard.compress(tar_of(*UPPER)))
    (tmp_path / "layers").mkdir()
    assert texts(images.read(place, tmp_path / "layers").root) == TOGETHER
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz") as packing:
        packing.add(place, ".")
    assert texts(read_tar(tar.getvalue(), tmp_path / "again").root) == TOGETHER


def test_a_root_file_system_alone_is_one_layer(tmp_path: Path) -> None:
    assert texts(read_tar(tar_of(member("./a/b", b"x")), tmp_path).root) == {"a/b": "x"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (saved(tar_of(member("../../etc/cron.d/x"))), "holds '../../etc/cron.d/x'"),
        (saved(tar_of(member("/etc/x"))), "absolute"),
        (saved(tar_of(member("x", kind=tarfile.LNKTYPE, link="../../etc/passwd"))), "which is no file"),
        (saved(tar_of(link("a", "b"), link("b", "a"), member("a/x"))), "circle"),
        (saved(tar_of(link("a", "d/" * 300), member("a/x"))), "deeper than 200 folders"),
        (saved(tar_of(link("a", "d/" * 150), member("a/" + "e/" * 60 + "x"))), "too deep|deeper than"),
        (saved(tar_of(*LOWER), architecture="s390x"), "programs are for s390x"),
        (saved(tar_of(*LOWER), count=2), "holds 2 images"),
        (saved(b"no tar" * 200), "no tar, or damaged"),
        (tar_of(member("manifest.json", b"{}")), "holds 0 images"),
        (tar_of(member("manifest.json", b"[1]")), "no image that is known"),
        (tar_of(member("manifest.json", b"[" * 100_000)), "is damaged"),
        (tar_of(member("manifest.json", b'[{"Layers": ["../x"]}]')), "allowed: files of its own"),
        (tar_of(member("manifest.json", b'[{"Layers": ["x"]}]')), "does not hold it"),
        (b"\x1f\x8b" + b"?" * 50, "damaged"),
        (b"", "no tar, or damaged"),
    ],
)
def test_images_that_are_refused_and_why(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(BaseRefused, match=why):
        read_tar(data, tmp_path)


def test_oci_layouts_that_are_refused_and_why(tmp_path: Path) -> None:
    (tmp_path / "layers").mkdir()
    for name, more, why in (
        ("damaged", {"damage": True}, "is damaged: its sha256"),
        ("other", {"architecture": "mips"}, "holds 0 images for"),
    ):
        with pytest.raises(BaseRefused, match=why):
            images.read(oci(tmp_path / name, tar_of(*LOWER), **more), tmp_path / "layers")  # type: ignore[arg-type]
    with pytest.raises(BaseRefused, match="--from-folder"):
        images.read(tmp_path, tmp_path / "layers")


PATHS = st.lists(st.sampled_from(["a", "b", "..", ".wh.a", ".wh..wh..opq", "c"]), min_size=1, max_size=3).map("/".join)
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
TARGETS = st.sampled_from(["a", "b/c", "/", "..", "../../..", "/a", "/etc/passwd"])


@st.composite
def layer_members(draw: st.DrawFn) -> Member:
    kind = draw(KINDS)
    return member(draw(PATHS), draw(st.binary(max_size=9)) if kind == tarfile.REGTYPE else b"", kind, draw(TARGETS))


@settings(max_examples=120)
@given(st.lists(st.lists(layer_members(), max_size=5), min_size=1, max_size=3))
def test_any_layers_give_a_root_that_unpacks_or_are_refused(layers: list[list[Member]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        try:
            image = read_tar(saved(*(tar_of(*one) for one in layers)), Path(place))
        except BaseRefused:
            return
        into = Path(place, "into")
        into.mkdir()
        tally = unpacked_to(into, packed(image.root))
        assert tally.files == len(list(walk(image.root)))
        assert not any(path.rpartition("/")[2].startswith(".wh.") for path, _ in walk(image.root))


def test_the_machine_type_is_that_of_its_shell(tmp_path: Path) -> None:
    host_programs(tmp_path)
    assert machine_of(from_folder(tmp_path).root) == os.uname().machine
    shell = tmp_path / "bin/sh"
    head = bytearray(shell.read_bytes()[:64])
    head[5], head[18:20] = 1, (22).to_bytes(2, "little")
    shell.write_bytes(head)
    assert machine_of(from_folder(tmp_path).root) == "s390x"
    shell.write_bytes(b"#!/bin/false")
    with pytest.raises(BaseRefused, match="is no program"):
        machine_of(from_folder(tmp_path).root)
    shell.unlink()
    with pytest.raises(BaseRefused, match="no /bin/sh"):
        machine_of(from_folder(tmp_path).root)
    shell.symlink_to("/../../usr/bin/env")  # of the host, where it would be found
    with pytest.raises(BaseRefused, match="no /bin/sh"):
        machine_of(from_folder(tmp_path).root)
