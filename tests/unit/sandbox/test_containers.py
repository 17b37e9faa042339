"""Sandboxes in containers, as far as no engine is needed: labels, layers, volumes' contents, the stream, errors."""

from __future__ import annotations

import asyncio
import io
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.sandbox import SandboxUnavailable, folders
from shared.sandbox.containers import bundle, engine, labels, stream, volumes
from shared.sandbox.inside import layer

NOW = 1_000_000.0


def marks(kind: str, owner: object, deadline: int = int(NOW) + 1) -> dict[str, str]:
    return {labels.KIND: kind, labels.OWNER: str(owner), labels.DEADLINE: str(deadline)}


def ended_process() -> labels.Owner:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    return labels.Owner(labels.this_process().machine, child.pid, "1")


def test_a_sandbox_of_a_living_process_stays_and_one_of_a_dead_process_goes() -> None:
    assert not labels.expired(marks("sandbox", labels.this_process()), NOW)
    assert labels.expired(marks("sandbox", ended_process()), NOW)


def test_a_reused_process_id_is_not_taken_for_the_owner() -> None:
    here = labels.this_process()
    assert labels.expired(marks("sandbox", labels.Owner(here.machine, here.pid, "1")), NOW)


def test_an_owner_on_another_machine_counts_as_alive_until_its_deadline() -> None:
    there = labels.Owner("elsewhere/boot/4026531836", 1, "1")
    assert not labels.expired(marks("sandbox", there), NOW)
    assert labels.expired(marks("sandbox", there, int(NOW) - 1), NOW)


def test_a_cache_outlives_its_owner_but_not_its_deadline() -> None:
    for kind in ("base", "files"):
        assert not labels.expired(marks(kind, ended_process()), NOW)
        assert labels.expired(marks(kind, ended_process(), int(NOW) - 1), NOW)


@pytest.mark.parametrize(
    "found", [{}, {"com.docker.compose.project": "etude"}, {labels.KIND: "other", labels.DEADLINE: "1"}]
)
def test_what_is_not_ours_is_never_removed(found: dict[str, str]) -> None:
    assert not labels.expired(found, NOW)


def test_a_label_without_a_readable_owner_or_deadline_keeps_its_thing() -> None:
    assert not labels.expired(marks("sandbox", "garbage"), NOW)
    assert not labels.expired({labels.KIND: "sandbox"}, NOW)


@given(
    st.builds(
        labels.Owner,
        st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1),
        st.integers(1, 1 << 22),
        st.text("0123456789", min_size=1),
    )
)
def test_an_owner_reads_back_as_written(owner: labels.Owner) -> None:
    assert labels.Owner.parse(str(owner)) == owner


def shown(top: Path) -> dict[str, tuple[str, int, bytes]]:
    """Return what a folder holds: path -> kind with mode, names, content or target."""
    found = {}
    for path in sorted(top.rglob("*")):
        info = path.lstat()
        data = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        names = 1 if path.is_dir() and not path.is_symlink() else info.st_nlink
        found[str(path.relative_to(top))] = (stat.filemode(info.st_mode), names, data)
    return found


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda name: name not in (".", ".."))
CONTENTS = st.recursive(
    st.one_of(st.binary(max_size=40), st.just("link"), st.just("pipe"), st.just("twin")),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


def lay_out(folder: Path, contents: object, first: list[Path]) -> None:
    """Make files (bytes), links, pipes, second names of the first file, and folders (dicts)."""
    if not isinstance(contents, dict):
        return
    for name, one in contents.items():
        path = folder / name
        if isinstance(one, dict):
            path.mkdir(mode=0o750)
            lay_out(path, one, first)
        elif isinstance(one, bytes):
            path.write_bytes(one)
            path.chmod(0o640)
            first.append(path)
        elif one == "link":
            path.symlink_to("nowhere")
        elif one == "pipe":
            os.mkfifo(path)
        elif first:
            path.hardlink_to(first[0])


@settings(max_examples=40)
@given(st.dictionaries(NAMES, CONTENTS, max_size=5))
def test_a_layer_that_is_copied_or_sent_keeps_kinds_modes_and_links(contents: object) -> None:
    with tempfile.TemporaryDirectory() as name:
        source, copied, sent = (Path(name, one) for one in ("source", "copied", "sent"))
        for folder in (source, copied, sent):
            folder.mkdir()
        lay_out(source, contents, [])
        folders.copy(source, copied, None)
        assert shown(copied) == shown(source)
        archive = io.BytesIO()
        layer.pack(str(source), archive, 1 << 20)
        layer.unpack(io.BytesIO(archive.getvalue()), str(sent))
        assert shown(sent) == shown(source)


def test_a_layer_keeps_what_an_overlay_notes(tmp_path: Path) -> None:
    source, sent = tmp_path / "source", tmp_path / "sent"
    for folder in (source, sent):
        folder.mkdir()
    (source / "hides").mkdir()
    try:
        os.setxattr(source / "hides", "user.overlay.opaque", b"y")
        os.mknod(source / "gone", stat.S_IFCHR, 0)
    except OSError as error:
        pytest.skip(f"this disk keeps no whiteouts: {error}")
    archive = io.BytesIO()
    layer.pack(str(source), archive, 1 << 20)
    layer.unpack(io.BytesIO(archive.getvalue()), str(sent))
    assert os.getxattr(sent / "hides", "user.overlay.opaque") == b"y"
    assert stat.S_ISCHR((sent / "gone").lstat().st_mode)
    assert (sent / "gone").lstat().st_rdev == 0


def test_a_layer_over_its_cap_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 16))
    with pytest.raises(ValueError, match="more than 65000 bytes"):
        layer.pack(str(tmp_path), io.BytesIO(), 65_000)


def test_the_digest_of_a_folder_changes_with_names_contents_modes_and_links(tmp_path: Path) -> None:
    def digest() -> str:
        return volumes.digest(volumes.entries(tmp_path))

    (tmp_path / "a").write_text("x")
    seen = [digest()]
    assert digest() == seen[0]
    (tmp_path / "a").write_text("y")
    seen.append(digest())
    (tmp_path / "a").chmod(0o600)
    seen.append(digest())
    (tmp_path / "a").rename(tmp_path / "b")
    seen.append(digest())
    (tmp_path / "c").symlink_to("b")
    seen.append(digest())
    assert len(set(seen)) == 5
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="allowed: files, folders and links"):
        digest()


def test_every_process_writes_the_same_bytes_for_our_modules() -> None:
    held: list[object] = []  # references to a module's objects, of which another process has none

    def hold(code: types.CodeType) -> None:
        held.extend((*code.co_names, *code.co_consts, code.co_code, code.co_filename, code.co_linetable))
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                hold(inner)

    path, compiled = Path(layer.__file__), []
    built_in = compile

    def compile_and_hold(*arguments: Any, **options: Any) -> types.CodeType:
        code: types.CodeType = built_in(*arguments, **options)
        hold(code)
        return code

    compiled.append(bundle._compiled("layer", path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "compile", compile_and_hold, raising=False)
        compiled.append(bundle._compiled("layer", path))
    assert len(held) > 100
    assert compiled[0] == compiled[1]


def test_the_bundle_runs_by_its_own_loader_without_the_system(tmp_path: Path) -> None:
    with (tmp_path / "bundle.tar").open("wb") as file:
        volumes.archive(bundle.bundle(), file, uid=os.getuid())
    home = tmp_path / "bundle"
    home.mkdir()
    subprocess.run(["tar", "-xf", str(tmp_path / "bundle.tar"), "-C", str(home)], check=True)
    command = [
        part.replace(bundle.HOME, str(home)) for part in bundle.script("import sys, json, ctypes; print(sys.prefix)")
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONHOME": "/nowhere"}, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(home), "")


def frame(number: int, data: bytes) -> bytes:
    return struct.pack(">BxxxI", number, len(data)) + data


def read_all(sent: bytes) -> tuple[bytes, str]:
    async def scenario() -> tuple[bytes, str]:
        ours, theirs = socket.socketpair()
        opened = await stream.opened(ours, None)
        theirs.sendall(sent)
        theirs.close()
        found = b""
        while data := await opened.read(3):
            found += data
        opened.close()
        return found, opened.errors

    return asyncio.run(scenario())


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=20)), max_size=8))
def test_the_stream_parts_output_from_errors(frames: list[tuple[int, bytes]]) -> None:
    found, errors = read_all(b"".join(frame(*one) for one in frames))
    assert found == b"".join(data for number, data in frames if number == 1)
    assert errors == "".join(data.decode(errors="replace") for number, data in frames if number == 2)


def test_a_stream_that_is_cut_ends() -> None:
    assert read_all(frame(1, b"abc") + frame(1, b"defgh")[:-2]) == (b"abc", "")


def test_an_engine_that_is_not_there_or_closed_to_us_is_told_with_the_way_out(tmp_path: Path) -> None:
    pytest.importorskip("docker")
    with pytest.raises(SandboxUnavailable, match=r"does not answer; start it \(sudo systemctl start docker\)"):
        engine.connect(f"unix://{tmp_path}/docker.sock")
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf.sock"))
        with pytest.raises(SandboxUnavailable, match="does not answer; start it"):
            engine.connect(f"unix://{tmp_path}/deaf.sock")


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (OSError("PermissionError(13, 'Permission denied')"), "join the group docker"),
        (OSError("write /var/lib/docker/x: no space left on device"), "the engine's disk is full"),
        (OSError("exec /bin/sh: exec format error"), "the image is for another machine type"),
        (OSError("('Connection aborted.', RemoteDisconnected())"), "stopped answering"),
    ],
)
def test_errors_of_the_engine_say_what_to_do(error: OSError, way_out: str) -> None:
    pytest.importorskip("docker")
    with pytest.raises(SandboxUnavailable, match=way_out), engine.spoken_for("a sandbox's container"):
        raise error


def test_containers_have_the_profile_of_the_workers() -> None:
    workers = Path(__file__).resolve().parents[3] / "infra" / "docker" / "seccomp-worker.json"
    assert Path(volumes.__file__).with_name("seccomp.json").read_bytes() == workers.read_bytes()
