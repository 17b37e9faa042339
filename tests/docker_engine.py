"""A Docker engine for tests, and an image made from this machine's own programs: nothing is pulled.

DOCKER_HOST names the engine, else the usual socket. Tests are skipped where none answers; ETUDE_TEST_DOCKER=require makes them
fail. On Debian: apt-get install docker.io, then start `dockerd` as root, or the service docker.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from shared.sandbox import SandboxUnavailable
from shared.sandbox.bubblewrap import shared_libraries
from shared.sandbox.containers import bundle, engine, labels, volumes
from shared.sandbox.containers.sandboxes import ContainerSandboxes
from shared.sandbox.containers.volumes import Entry
from tests import missing

COMMAND = "apt-get install docker.io"
_PROGRAMS = (  # noqa: SIM905 a list of one word a line says no more
    "bash cat chmod cp cut date dd df echo env expr false find getconf grep gzip head hostname id kill ln ls mkdir mkfifo mknod "
    "mktemp mount mv nice nohup od pgrep printf ps pwd readlink realpath rm rmdir sed seq setsid sh sha256sum sleep sort stat "
    "tail tar tee test timeout touch tr true truncate umount uname unshare wc yes"
).split()
_PYTHON = "usr/lib/etude-python"
# What Rust's programs are linked with.
_LINKED = "*crt*.o lib[cm].so* libc_nonshared.a libmvec.* libgcc_s.* libutil.a libpthread.a libdl.a librt.a".split()  # noqa: SIM905


@functools.cache
def absent() -> str:
    """Return why no engine answers; empty: one does."""
    try:
        engine.connect().close()
    except SandboxUnavailable as error:
        return str(error)
    return ""


def need() -> None:
    if why := absent():
        if os.environ.get("ETUDE_TEST_DOCKER") == "require":
            pytest.fail(why)
        missing.skip(["Docker engine"], COMMAND)


def sandboxes(**options: Any) -> ContainerSandboxes:
    """Return the adapter, with the image below for bases that name none."""
    need()
    return ContainerSandboxes(image=image(), warm=0, **options)


@functools.cache
def image() -> str:
    """Return an image with a shell, the usual programs and Python. It is made once per engine, and reaped after a week."""
    return _imported([*_system(_PROGRAMS), *_python()])


@functools.cache
def shell_alone() -> str:
    """Return an image with /bin/sh and its libraries, without even /tmp."""
    return _imported(_system(["sh"])[:-1])


@functools.cache
def compilers() -> str:
    """Return an image with what this machine has of Node, /opt/java, and /opt/rust with the linker that it calls."""
    trees: dict[str, Path] = {}
    if java := shutil.which("java"):
        home = Path(os.path.realpath(java)).parent.parent
        trees |= _tree(home, "opt/java", ("jmods", "legal", "man", "src.zip"))
    if chain := toolchain():
        trees |= _tree(chain, "opt/rust", ("share", "etc", "libexec"))
        objects = Path(_of_gcc("crtbegin.o")).parent
        trees |= _tree(objects, str(objects)[1:], ("cc1", "cc1plus", "lto1", "plugin", "include"))
        system = Path(_of_gcc("crt1.o")).resolve().parent
        found = [path for pattern in _LINKED for path in system.glob(pattern)]
        trees |= {str(path)[1:]: path.resolve() for path in found}
    loaded = shared_libraries(tuple(str(path) for path in trees.values() if ".so" in path.name))
    trees |= {_place(path): Path(os.path.realpath(path)) for path in loaded}
    return _imported([*_system([*_PROGRAMS, "node", "cc", "ld"], trees), *_python()])


def toolchain() -> Path | None:
    """Return the folder of a Rust compiler that lies in a home."""
    return next((path.parent.parent for path in sorted((Path.home() / ".rustup/toolchains").glob("*/bin/rustc"))), None)


def _of_gcc(name: str) -> str:
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def _tree(folder: Path, place: str, without: Sequence[str]) -> dict[str, Path]:
    """Return the files below a folder by their places in an image, links followed; `without`: names at its top."""
    found = (path for path in folder.rglob("*") if path.relative_to(folder).parts[0] not in without)
    return {f"{place}/{path.relative_to(folder)}": path.resolve() for path in found if path.is_file()}


@functools.cache
def foreign() -> str:
    """Return an image that says it is for s390x."""
    layer, packed, name = bytes(10240), io.BytesIO(), "etude-test:s390x"
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}
    marks = labels.labels("base", seconds=labels.CACHE_S)
    config = {"architecture": "s390x", "os": "linux", "rootfs": rootfs, "config": {"Labels": marks}}
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"config.json": json.dumps(config), "manifest.json": json.dumps(manifest)}
    contents = [Entry(path, 0o644, source=text.encode()) for path, text in files.items()]
    volumes.archive([*contents, Entry("layer.tar", 0o644, source=layer)], packed)
    found = engine.connect()
    try:
        found.client.images.load(packed.getvalue())
    finally:
        found.close()
    return name


@functools.cache
def lying() -> str:
    """Return an image that says it is for this machine, and whose shell is for s390x."""
    program = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\x16\x00" + bytes(100)
    return _imported([Entry("bin", 0o755), Entry("bin/sh", 0o755, source=program), Entry("tmp", 0o1777)])


def _imported(contents: list[Entry]) -> str:
    name = f"etude-test:{volumes.digest(contents, 'format 2')}"
    found = engine.connect()
    try:
        if found.client.images.list(name=name):
            return name
        marks = labels.labels("base", seconds=labels.CACHE_S)
        changes = [f"LABEL {key}={value}" for key, value in marks.items()]
        repository, tag = name.split(":")
        with tempfile.NamedTemporaryFile() as packed, engine.spoken_for("the image for tests"):
            volumes.archive(contents, packed)
            packed.flush()
            found.api.import_image_from_file(packed.name, repository=repository, tag=tag, changes=changes)
    finally:
        found.close()
    return name


def _system(names: Sequence[str], more: Mapping[str, Path] = MappingProxyType({})) -> list[Entry]:
    """Return the programs with their libraries, and more files by their places; the last entry is /tmp."""
    programs = [path for name in names if (path := shutil.which(name, path="/usr/bin:/bin"))]
    files = {_place(path): Path(os.path.realpath(path)) for path in (*programs, *shared_libraries(tuple(programs)))}
    files |= more
    links = [
        Entry(name, 0o777, target=os.readlink(f"/{name}"))
        for name in ("bin", "lib", "lib64", "sbin")
        if Path("/", name).is_symlink()
    ]
    folders = {str(parent) for path in files for parent in Path(path).parents} - {"."} | {
        "etc",
        "root",
        "usr/bin",
        _PYTHON,
    }
    made = [Entry(path, 0o755) for path in sorted(folders)]
    sources = [Entry(path, 0o755, source=source) for path, source in sorted(files.items())]
    return [*made, *links, *sources, Entry("tmp", 0o1777)]


def _place(path: str) -> str:
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)).lstrip("/")


def _python() -> list[Entry]:
    """The bundle's interpreter, and a list of users: most images have no Python, and most attacks are written in it."""
    home = f"/{_PYTHON}"
    start = f'#!/bin/sh\nexec {home}/libraries/loader --library-path {home}/libraries {home}/bin/python3 "$@"\n'
    found = [Entry(f"{_PYTHON}/{one.path}", one.mode, one.source, one.target) for one in bundle.bundle()]
    users = Entry("etc/passwd", 0o644, source=b"root:x:0:0:root:/root:/bin/sh\n")
    return [*found, Entry("usr/bin/python3", 0o755, source=start.encode()), users]
