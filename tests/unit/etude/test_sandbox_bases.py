"""`etude sandbox base`: a base is made, named, listed, unpacked and removed, and what cannot be had is refused with a way out."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from etude.sandbox import app
from shared.objects.directory import DirectoryObjects
from shared.sandbox.bases import cache, release, store
from tests.unit.sandbox.rootfs_world import host_programs


@pytest.fixture(autouse=True)
def let_go() -> object:
    yield
    for held in list(cache._holds):
        while held in cache._holds:
            release(held / "root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    host_programs(tmp_path / "root")
    return tmp_path / "root"


def say(tmp_path: Path, *arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["base", *arguments, "--state", str(tmp_path / "state")], env=environment)


def facts(tmp_path: Path, *arguments: str) -> Any:
    said = say(tmp_path, *arguments, "--json")
    assert said.exit_code == 0, said.output
    return json.loads(said.stdout)


def test_a_base_from_a_folder_is_made_listed_unpacked_and_removed(tmp_path: Path, root: Path) -> None:
    made = facts(tmp_path, "make", "small", "--from-folder", str(root))
    assert (made["machine"], made["replaced"]) == (store.machine(), None)
    assert made["made"] == {"from-folder": "root"}
    assert [(one["name"], one["here"]) for one in facts(tmp_path, "list")] == [("small", False)]
    unpacked = facts(tmp_path, "unpack", "small")
    assert unpacked["digest"] == made["digest"]
    assert (Path(unpacked["folder"]) / "bin/sh").read_bytes() == (root / "bin/sh").read_bytes()
    if os.geteuid() == 0:
        told = subprocess.run(["chroot", unpacked["folder"], "/bin/sh", "-c", "echo $((6*7))"], capture_output=True)
        assert told.stdout == b"42\n", told.stderr
    assert facts(tmp_path, "show", made["digest"])["here"] is True
    assert made["digest"] in say(tmp_path, "show", "small").output
    assert "small" in say(tmp_path, "list").output
    assert facts(tmp_path, "remove", "small", "--yes") == {"name": "small", "digest": made["digest"], "removed": True}
    assert facts(tmp_path, "list") == []
    assert list(DirectoryObjects(tmp_path / "state/objects").list("")) == []


def test_the_same_files_give_the_same_digest_and_a_name_can_be_moved(tmp_path: Path, root: Path) -> None:
    first = facts(tmp_path, "make", "one", "--from-folder", str(root))
    os.utime(root / "bin/sh", (1, 1))
    (root / "tmp/left").write_text("by somebody")
    again = facts(tmp_path, "make", "two", "--from-folder", str(root))
    assert again["digest"] == first["digest"]
    (root / "etc/motd").write_text("new")
    moved = facts(tmp_path, "make", "two", "--from-folder", str(root))
    assert moved["replaced"] == first["digest"] != moved["digest"]
    assert "still there" in say(tmp_path, "make", "one", "--from-folder", str(root)).output
    assert [one["name"] for one in facts(tmp_path, "list")] == ["one", "two", None]  # the first has no name any more
    said = say(tmp_path, "remove", moved["digest"], "--yes")
    assert (said.exit_code, "is named one, two" in said.output) == (2, True)
    assert facts(tmp_path, "remove", "one", "--yes")["removed"] is False
    assert facts(tmp_path, "remove", first["digest"], "--yes")["removed"] is True


def test_remove_asks(tmp_path: Path, root: Path) -> None:
    facts(tmp_path, "make", "small", "--from-folder", str(root))
    assert say(tmp_path, "remove", "small").exit_code == 1
    assert len(facts(tmp_path, "list")) == 1


def test_a_damaged_base_is_listed_as_that(tmp_path: Path, root: Path) -> None:
    made = facts(tmp_path, "make", "small", "--from-folder", str(root))
    DirectoryObjects(tmp_path / "state/objects").put(f"bases/{made['digest']}.json", b'{"digest": 1}')
    assert "damaged" in facts(tmp_path, "list")[0]
    assert "damaged" in say(tmp_path, "list").output
    assert facts(tmp_path, "make", "small", "--from-folder", str(root))["digest"] == made["digest"]  # which repairs it
    assert "damaged" not in facts(tmp_path, "list")[0]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("make", "UP", "--from-folder", "{root}"), "small letters"),
        (("make", "a"), "found 0 of --debian, --from-image, --from-folder"),
        (("make", "a", "--debian", "bookworm", "--from-folder", "{root}"), "found 2 of"),
        (("make", "a", "--from-folder", "/"), "this whole machine"),
        (("make", "a", "--from-folder", "/nowhere"), "there is no such folder"),
        (("make", "a", "--from-image", "/nowhere"), "there is no such file"),
        (("make", "a", "--from-folder", "{root}", "--packages", "git"), "go with --debian alone"),
        (("make", "a", "--from-folder", "{root}", "--python", "three"), "allowed: 3.X"),
        (("make", "a", "--from-folder", "{root}", "--python", "3.12"), "uv is not installed here"),
        (("make", "a", "--from-folder", "{root}", "--python-from", "/x"), "needs --python"),
        (("make", "a", "--from-folder", "{root}", "--python", "3.12", "--python-from", "{root}"), "no bin/python3.12"),
        (("make", "a", "--from-folder", "{root}/bin"), "no /bin/sh"),
        (("make", "a", "--debian", "bookworm"), "apt install mmdebstrap"),
        (("make", "a", "--debian", "--oops"), "the name of a suite"),
        (("make", "a", "--debian", "bookworm", "--packages", "git,$(x)"), "names of Debian packages"),
        (("show", "nobody"), "there is none of this name"),
        (("unpack", "0" * 64), "none with digest"),
        (("remove", "nobody"), "there is none of this name"),
    ],
)
def test_what_cannot_be_had_is_refused_and_leaves_nothing(
    tmp_path: Path, root: Path, arguments: tuple[str, ...], why: str
) -> None:
    said = say(tmp_path, *(one.replace("{root}", str(root)) for one in arguments), PATH="/nowhere")
    assert said.exit_code == 2
    assert why in said.output
    assert not [path for path in (tmp_path / "state").rglob("*") if path.is_file()]


def python(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python3.12").write_bytes(b"a Python")
    (folder / "lib").mkdir()
    (folder / "lib/os.py").write_bytes(b"")
    return folder


@pytest.mark.parametrize("form", ["folder", "install", "full"])
def test_a_python_is_put_below_usr_local(tmp_path: Path, root: Path, form: str) -> None:
    given = python(tmp_path / "given")
    if form != "folder":
        with tarfile.open(tmp_path / "python.tar.gz", "w:gz") as tar:
            tar.add(given, "python/install" if form == "full" else "python")
        given = tmp_path / "python.tar.gz"
    options = ("--python", "3.12", "--python-from", str(given))
    made = facts(tmp_path, "make", "py", "--from-folder", str(root), *options)
    assert made["made"] == {"from-folder": "root", "python": "3.12", "python-from": given.name}
    place = Path(facts(tmp_path, "unpack", "py")["folder"]) / "usr/local"
    assert (place / "bin/python").read_bytes() == b"a Python"
    assert (place / "bin/python3").readlink() == Path("python3.12")
    assert (place / "lib/os.py").exists()


def test_a_virtual_environment_is_no_python(tmp_path: Path, root: Path) -> None:
    given = python(tmp_path / "given")
    (given / "pyvenv.cfg").touch()
    options = ("--from-folder", str(root), "--python", "3.12", "--python-from", str(given))
    assert "virtual environment" in say(tmp_path, "make", "py", *options).output
    (given / "pyvenv.cfg").unlink()
    (given / "bin/python3.12").unlink()
    (given / "bin/python3.12").symlink_to("/usr/bin/env")
    assert "link that leaves it" in say(tmp_path, "make", "py", *options).output


def tool(tmp_path: Path, name: str, script: str) -> str:
    (tmp_path / "tools").mkdir(exist_ok=True)
    (tmp_path / "tools" / name).write_text(f"#!/bin/sh\n{script}")
    (tmp_path / "tools" / name).chmod(0o755)
    return f"{tmp_path / 'tools'}:{os.environ['PATH']}"


def test_debian_s_tool_is_given_the_packages_and_a_fixed_time(tmp_path: Path, root: Path) -> None:
    script = f'echo "I: working" >&2; echo "$@" "$SOURCE_DATE_EPOCH" "$ETUDE_S3_SECRET_KEY" > {tmp_path}/asked\n'
    script += f'while [ "$1" != bookworm ]; do shift; done; tar -C {root} -cf "$2" .'
    path = tool(tmp_path, "mmdebstrap", script)
    options = (
        "--debian",
        "bookworm",
        "--python",
        "3.11",
        "--packages",
        "git, make",
        "--mirror",
        "http://mirror/debian",
    )
    said = say(tmp_path, "make", "deb", *options, PATH=path, ETUDE_S3_SECRET_KEY="secret")
    assert said.exit_code == 0, said.output
    asked = (tmp_path / "asked").read_text()
    assert "--include=git,make,python3,python3-pip,python3-venv bookworm" in asked
    assert "http://mirror/debian 946684800" in asked
    assert "secret" not in asked
    place = Path(facts(tmp_path, "unpack", "deb")["folder"])
    assert os.readlink(place / "usr/local/bin/python") == "/usr/bin/python3"


def test_what_debian_s_tool_and_uv_say_is_told(tmp_path: Path, root: Path) -> None:
    path = tool(tmp_path, "mmdebstrap", 'echo "I: begin" >&2; echo "E: Unable to locate package nosuch" >&2; exit 25')
    said = say(tmp_path, "make", "deb", "--debian", "bookworm", "--packages", "nosuch", PATH=path)
    assert (said.exit_code, "Unable to locate package nosuch" in said.output) == (2, True)
    path = tool(tmp_path, "uv", "echo no network >&2; exit 1")
    said = say(tmp_path, "make", "deb", "--debian", "bookworm", "--python", "3.12", PATH=path)
    assert "uv could not install it: no network; give one with --python-from" in said.output


def test_uv_s_python_is_taken(tmp_path: Path, root: Path) -> None:
    given = python(tmp_path / "given")
    path = tool(tmp_path, "uv", f'mkdir -p "$5" && cp -r {given} "$5/cpython-3.12.9-linux-x86_64-gnu"')
    said = say(tmp_path, "make", "py", "--from-folder", str(root), "--python", "3.12", "--json", PATH=path)
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["made"]["python-from"] == "uv"
