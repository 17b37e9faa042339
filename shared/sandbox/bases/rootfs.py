"""Root file systems as data: read from a folder or from the layers of an image, cleaned, and packed as one tar.

Reading writes nothing: files stay where they are, and a `File` says where. Layers and links of an image are followed in the tree
alone, so none can lead to the host.

Invariants of what `pack` writes:
- Equal files give equal bytes: paths are sorted; owners, modes and times say nothing of who made it, where or when.
- Every hard link comes behind the file that it is a name of, and every folder before what is in it.
"""

from __future__ import annotations

import io
import os
import re
import stat
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shared.archives import MAX_DEPTH, wrong_path, wrong_target
from shared.sandbox.bases.store import BaseRefused
from shared.sandbox.bases.unpack import MAX_BYTES, MAX_FILES

TIME = 946_684_800  # 2000-01-01: of every file that needs no time of its own; zip knows none before 1980
_MAX_HOPS = 40  # links that one path may lead through, as in Linux
_CHUNK = 1 << 20
_ELF_MACHINES = {3: "i686", 40: "armv7l", 21: "ppc64le", 22: "s390x", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_COMPILED = re.compile(r"(?P<module>.+)\.[a-z]+-?\d+(\.opt-\d)?\.pyc\Z")


@dataclass(frozen=True, slots=True)
class File:
    """`size` bytes at `offset` of the file `at`. Two with the same place are names of one file. `data`: the bytes themselves;
    None: they are read from `at`."""

    at: Path
    offset: int
    size: int
    executable: bool
    time: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Link:
    target: str


@dataclass(slots=True)
class Folder:
    children: dict[str, Node] = field(default_factory=dict)


Node = File | Link | Folder


@dataclass(frozen=True, slots=True)
class Read:
    """`left_out`: path -> why it cannot be part of a base."""

    root: Folder
    left_out: dict[str, str]


def from_folder(folder: Path, skip: Callable[[str], bool] = lambda path: False) -> Read:
    """Read a folder without following links. `skip`: paths that are not looked at, nor what is below. Devices, sockets, pipes,
    and other disks that are mounted in it are left out. Raises BaseRefused."""
    root, left_out = Folder(), dict[str, str]()
    known: dict[tuple[int, int], File] = {}
    disk = _stat(str(folder)).st_dev
    waiting = [(str(folder), "", root)]
    while waiting:
        place, before, into = waiting.pop()
        for entry in _entries(place):
            path = before + entry.name
            if skip(path):
                continue
            found = _stat(entry.path)
            if wrong := wrong_path(path):
                left_out[path] = wrong
            elif stat.S_ISLNK(found.st_mode):
                target = os.readlink(entry.path)
                if wrong := wrong_target(target):
                    left_out[path] = wrong
                else:
                    into.children[entry.name] = Link(target)
            elif stat.S_ISDIR(found.st_mode) and found.st_dev != disk:
                left_out[path] = "is another disk"
                into.children[entry.name] = Folder()
            elif stat.S_ISDIR(found.st_mode):
                into.children[entry.name] = below = Folder()
                waiting.append((entry.path, f"{path}/", below))
            elif stat.S_ISREG(found.st_mode):
                executable = bool(found.st_mode & 0o111)
                file = File(Path(entry.path), 0, found.st_size, executable, int(found.st_mtime))
                into.children[entry.name] = known.setdefault((found.st_dev, found.st_ino), file)
            else:
                left_out[path] = "is a device, a socket or a pipe"
    return Read(root, left_out)


def _stat(path: str) -> os.stat_result:
    try:
        return os.lstat(path)
    except OSError as error:
        raise BaseRefused(f"{path!r:.200}: cannot be read ({error.strerror})") from None


def _entries(place: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(place) as entries:
            return list(entries)
    except OSError as error:
        raise BaseRefused(
            f"{place!r:.200}: cannot be read ({error.strerror}); run this as a user who may read all of it"
        ) from None


def walk(root: Folder) -> Iterator[tuple[str, Node]]:
    """Yield every path below the root, sorted, each folder before what is in it."""
    waiting: list[tuple[str, Node]] = [(name, root.children[name]) for name in sorted(root.children, reverse=True)]
    while waiting:
        path, node = waiting.pop()
        yield path, node
        if isinstance(node, Folder):
            waiting += [(f"{path}/{name}", node.children[name]) for name in sorted(node.children, reverse=True)]


def located(root: Folder, path: str, *, make: bool = False) -> tuple[Folder, str] | None:
    """Return the folder in which the last part of `path` stands, and that part, or None where there is no such folder. Links on
    the way are followed inside the root; `..` at its top stays there. `make`: folders that are missing are made, and take the
    place of files. Raises BaseRefused for links in a circle."""
    way: list[Folder] = [root]
    parts = path.split("/")[::-1]
    hops = 0
    while parts:
        part = parts.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del way[max(1, len(way) - 1) :]
            continue
        if not any(rest not in ("", ".") for rest in parts):
            return way[-1], part
        child = way[-1].children.get(part)
        if isinstance(child, Link):
            hops += 1
            if hops > _MAX_HOPS:
                raise BaseRefused(f"{path!r:.200}: leads in a circle or through more than {_MAX_HOPS} links")
            if child.target.startswith("/"):
                del way[1:]
            parts += child.target.split("/")[::-1]
            continue
        if not isinstance(child, Folder):
            if not make:
                return None
            way[-1].children[part] = child = Folder()
        way.append(child)
        if len(way) > MAX_DEPTH:
            raise BaseRefused(f"{path!r:.200}: leads deeper than {MAX_DEPTH} folders")
    return None


def found(root: Folder, path: str) -> Node | None:
    """Return what stands at a path, with every link followed inside the root, or None. Raises BaseRefused for a circle."""
    for _ in range(_MAX_HOPS):
        place = located(root, path)
        node = place[0].children.get(place[1]) if place else None
        if not isinstance(node, Link):
            return node
        above = path.rstrip("/").rpartition("/")[0]
        path = node.target if node.target.startswith("/") else f"{above}/{node.target}"
    raise BaseRefused(f"{path!r:.200}: leads in a circle or through more than {_MAX_HOPS} links")


def put(root: Folder, path: str, node: Node) -> None:
    """Place a node; folders above it are made. A folder is merged into one that is there."""
    place = located(root, path, make=True)
    assert place is not None, path
    folder, name = place
    there = folder.children.get(name)
    if isinstance(node, Folder) and isinstance(there, Folder):
        for below, child in node.children.items():
            put(there, below, child)
    else:
        folder.children[name] = node


def machine_of(root: Folder) -> str:
    """Return the machine type of the programs, as /bin/sh is one. Raises BaseRefused where there is no such program."""
    shell = found(root, "bin/sh")
    if not isinstance(shell, File):
        raise BaseRefused("it has no /bin/sh, and no command could run in it; add a shell")
    head = content(shell, 20)
    if head[:4] != b"\x7fELF" or len(head) < 20:
        raise BaseRefused(f"its /bin/sh is no program (it begins with {head[:4]!r}); add a shell")
    number = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
    name = _ELF_MACHINES.get(number, f"machine type {number} of ELF")
    return f"{name}-big-endian" if name == "ppc64le" and head[5] == 2 else name


def content(file: File, most: int) -> bytes:
    """Return the first bytes of a file, at most `most`. Raises BaseRefused."""
    if file.data is not None:
        return file.data[:most]
    with _opened(file) as source:
        return source.read(min(most, file.size))


def _opened(file: File) -> IO[bytes]:
    try:
        # Non-blocking: a pipe that took the file's place since would be waited for.
        descriptor = os.open(file.at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(descriptor, file.offset, os.SEEK_SET)
        return os.fdopen(descriptor, "rb")
    except OSError as error:
        raise BaseRefused(f"{file.at}: cannot be read ({error.strerror})") from None


def pack(root: Folder, into: IO[bytes], progress: Callable[[int], None] = lambda size: None) -> None:
    """Write the tar. `progress` is told the bytes of files so far. Raises BaseRefused, OSError."""
    times = _times(root)
    first: dict[tuple[Path, int], str] = {}
    size = files = 0
    with tarfile.open(fileobj=into, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path, node in walk(root):
            files += 1
            if wrong := wrong_path(path):  # by a link of an image: what was read was looked at
                raise BaseRefused(f"{path!r:.200}: {wrong}")
            info = tarfile.TarInfo(path)
            info.mode, info.mtime = 0o755, TIME
            if isinstance(node, Folder):
                info.type = tarfile.DIRTYPE
            elif isinstance(node, Link):
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, node.target, 0o777
            elif node.data is None and (node.at, node.offset) in first:
                info.type, info.linkname = tarfile.LNKTYPE, first[node.at, node.offset]
            else:
                size += node.size
                if node.size:  # empty files of a layer may stand at one place
                    first[node.at, node.offset] = path
                info.size, info.mode = node.size, 0o755 if node.executable else 0o644
                info.mtime = times.get((node.at, node.offset), TIME)
            if size > MAX_BYTES or files > MAX_FILES:
                raise BaseRefused(
                    f"it has more than {MAX_BYTES} bytes or {MAX_FILES} files; allowed: no more; leave some out"
                )
            if info.isreg():
                _add(tar, info, node)  # type: ignore[arg-type]
                progress(size)
            else:
                tar.addfile(info)


def _add(tar: tarfile.TarFile, info: tarfile.TarInfo, file: File) -> None:
    with io.BytesIO(file.data) if file.data is not None else _opened(file) as source:
        try:
            tar.addfile(info, source)
        except OSError as error:
            if error.errno is None:  # tarfile's own: the source ended early
                raise BaseRefused(f"{file.at}: became shorter while it was read; keep it as it is meanwhile") from None
            raise


def _times(root: Folder) -> dict[tuple[Path, int], int]:
    """Return the times of those Python sources whose compiled form names them: with another time Python would compile again."""
    times: dict[tuple[Path, int], int] = {}
    for folder in (root, *(node for _, node in walk(root))):
        if not isinstance(folder, Folder) or not isinstance(cache := folder.children.get("__pycache__"), Folder):
            continue
        for name, compiled in cache.children.items():
            if not (match := _COMPILED.match(name)) or not isinstance(compiled, File) or compiled.size < 16:
                continue
            source = folder.children.get(f"{match['module']}.py")
            if isinstance(source, File) and source.data is None:
                flags, time, size = struct.unpack("<4xIII", content(compiled, 16))
                if not flags and (time, size) == (source.time & 0xFFFFFFFF, source.size & 0xFFFFFFFF):
                    times[source.at, source.offset] = time
    return times
