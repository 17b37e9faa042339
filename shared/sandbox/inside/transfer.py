"""Files in and out of the sandbox, in a cell of their own: with no more rights than the code inside.

Invariants:
- Every path is opened one name at a time, and no name may be a link: what the code inside swaps meanwhile leads nowhere.
- Only regular files and folders cross the border. A FIFO or a device is never opened to be read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import stat
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 16
DEPTH = 200  # folders within folders


class Refused(ValueError):
    """This may not cross the border; the text says why."""


UNREADABLE = -2
# What opening a file gives that the code inside has closed, or swapped for something else meanwhile.
_CLOSED = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EINVAL)


class Entry(NamedTuple):
    path: str
    info: os.stat_result
    fd: int  # of a regular file, to be closed by the receiver; -1: something else; UNREADABLE: its owner closed it to all
    link: str  # where a link leads; empty: it is none


def names(path: str) -> list[str]:
    """Return the names in a path. Raises Refused for `..` and NUL."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in path:
        raise Refused(f"{path!r:.200}: found '..' or NUL in a path; allowed: plain names")
    if len(parts) > DEPTH:
        raise Refused(f"{path!r:.200}: found {len(parts)} folders within folders; allowed: {DEPTH}")
    return parts


def parent_of(top: int, parts: list[str], *, make: bool) -> int:
    """Open the folder that holds the last of the names, below the folder `top`. Raises Refused, OSError."""
    at = os.dup(top)
    for name in parts[:-1]:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=at)
            inner = os.open(name, _FOLDER, dir_fd=at)
        except OSError as error:
            os.close(at)
            if error.errno in _CLOSED:
                raise Refused(
                    f"{'/'.join(parts)!r:.200}: {name!r:.80} is a link, no folder, or closed to all"
                ) from None
            raise
        os.close(at)
        at = inner
    return at


def put(source: BinaryIO, at: str, size: int, files: int) -> None:
    """Unpack a tar archive into a folder, which is made. Files that exist are replaced. Raises Refused, OSError."""
    os.makedirs(at, exist_ok=True)
    top = os.open(at, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    left = size
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for count, member in enumerate(archive):
            left -= member.size
            if left < 0 or count >= files:
                raise Refused(f"archive: found more than {size} bytes or {files} entries")
            _put_one(archive, member, top)


def _put_one(archive: tarfile.TarFile, member: tarfile.TarInfo, top: int) -> None:
    if member.name.startswith("/") or not (member.isreg() or member.isdir()):
        raise Refused(f"{member.name!r:.200}: found an absolute path, a link or a device; allowed: files and folders")
    parts = names(member.name)
    if not parts:
        return
    folder = parent_of(top, parts, make=True)
    try:
        if member.isdir():
            _make_folder(parts[-1], member.mode, folder)
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(parts[-1], dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(parts[-1], flags, 0o600, dir_fd=folder), "wb") as target:
            data = archive.extractfile(member)
            while data is not None and (chunk := data.read(_CHUNK)):
                target.write(chunk)
            target.flush()
            os.fchmod(target.fileno(), member.mode & 0o777)
            os.utime(target.fileno(), (member.mtime, member.mtime))
    finally:
        os.close(folder)


def _make_folder(name: str, mode: int, folder: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, dir_fd=folder)
    inner = os.open(name, _FOLDER, dir_fd=folder)
    os.fchmod(inner, mode & 0o777 | 0o700)
    os.close(inner)


def walk(top: int, prefix: str, name: str, depth: int = 0) -> Iterator[Entry]:
    """Yield what stands under a name, and below it where that is a folder. What vanishes meanwhile is left out."""
    path = f"{prefix}/{name}" if prefix else name
    info = os.stat(name, dir_fd=top, follow_symlinks=False)
    try:
        if stat.S_ISREG(info.st_mode):
            fd = os.open(name, _FILE, dir_fd=top)
            yield Entry(path, os.fstat(fd), fd, "")
        elif stat.S_ISDIR(info.st_mode):
            if depth > DEPTH:
                raise Refused(f"{path!r:.200}: more than {DEPTH} folders deep")
            inner = os.open(name, _FOLDER, dir_fd=top)
            yield Entry(path, info, -1, "")
            yield from _walk_folder(inner, path, info, depth)
        else:
            yield Entry(path, info, -1, os.readlink(name, dir_fd=top) if stat.S_ISLNK(info.st_mode) else "")
    except OSError as error:
        if error.errno not in _CLOSED:
            raise
        yield Entry(path, info, UNREADABLE, "")


def _walk_folder(inner: int, path: str, info: os.stat_result, depth: int) -> Iterator[Entry]:
    """Yield what stands in an open folder, and close it."""
    try:
        for child in sorted(os.listdir(inner)):
            try:
                yield from walk(inner, path, child, depth + 1)
            except FileNotFoundError:
                continue
            except PermissionError:  # names can be read in the folder, and nothing else
                yield Entry(f"{path}/{child}", info, UNREADABLE, "")
    finally:
        os.close(inner)


def _found(base: str, path: str) -> Iterator[Entry]:
    """Yield what stands at a path, relative ones from `base`. Raises FileNotFoundError, Refused."""
    parts = names(path if path.startswith("/") else f"{base}/{path}")
    shown = names(path)
    root = os.open("/", _FOLDER)
    try:
        if not parts:
            raise Refused("found the root itself; allowed: files and folders below it")
        folder = parent_of(root, parts, make=False)
    finally:
        os.close(root)
    try:
        for entry in walk(folder, "/".join(shown[:-1]), parts[-1]):
            # Of the base itself ("."), entries are named from the base.
            yield entry if shown else entry._replace(path=entry.path.partition("/")[2])
    except PermissionError as error:
        raise Refused(f"{path!r:.200}: {error.strerror}") from None
    finally:
        os.close(folder)


def get(target: BinaryIO, base: str, paths: list[str], size: int, files: int) -> None:
    """Write files and folders as a tar archive; other things in folders are left out. Raises FileNotFoundError, Refused."""
    left, count = size, 0
    for path in paths:
        first = True
        for entry in _found(base, path):
            mode = entry.info.st_mode
            if first and (entry.fd == UNREADABLE or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))):
                raise Refused(f"{path!r:.200}: a link, a device or closed to all; allowed: files and folders")
            first = False
            count += 1
            left -= entry.info.st_size if entry.fd >= 0 else 0
            if left < 0 or count > files:
                raise Refused(f"{path!r:.200}: more than {size} bytes or {files} files")
            if entry.path and (entry.fd >= 0 or (entry.fd == -1 and stat.S_ISDIR(mode))):
                _write_one(target, entry)
    target.write(bytes(2 * tarfile.BLOCKSIZE))
    target.flush()


def _write_one(target: BinaryIO, entry: Entry) -> None:
    member = tarfile.TarInfo(entry.path)
    member.mode = entry.info.st_mode & 0o777
    member.mtime = int(entry.info.st_mtime)
    if entry.fd < 0:
        member.type = tarfile.DIRTYPE
        target.write(member.tobuf(tarfile.PAX_FORMAT))
        return
    member.size = entry.info.st_size
    with open(entry.fd, "rb") as source:
        target.write(member.tobuf(tarfile.PAX_FORMAT))
        left = member.size
        while left > 0:
            chunk = source.read(min(left, _CHUNK)) or bytes(min(left, _CHUNK))  # it became shorter meanwhile
            target.write(chunk)
            left -= len(chunk)
    target.write(bytes(-member.size % tarfile.BLOCKSIZE))


def scan(target: BinaryIO, base: str, paths: list[str], size: int, files: int) -> None:
    """Write one JSON line for each entry: path, kind, mode, bytes, digest of a file or aim of a link. Raises as `get`; a
    file of more than `size` bytes has no digest."""
    count = 0
    for path in paths:
        for entry in _found(base, path):
            count += 1
            if count > files:
                raise Refused(f"{path!r:.200}: more than {files} entries")
            target.write(json.dumps(_line(entry, size)).encode() + b"\n")
    target.flush()


def lines(folder: Path, size: int) -> list[Any]:
    """Return what `scan` tells of a folder, as lists, without the folder itself. Raises OSError."""
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return [_line(entry, size) for name in sorted(os.listdir(top)) for entry in walk(top, "", name)]
    finally:
        os.close(top)


def _line(entry: Entry, size: int) -> list[Any]:
    mode = entry.info.st_mode
    if entry.fd == UNREADABLE:
        return [entry.path, "unreadable", mode & 0o777, 0, ""]
    if entry.fd < 0:
        kind = "folder" if stat.S_ISDIR(mode) else "link" if stat.S_ISLNK(mode) else "device"
        return [entry.path, kind, mode & 0o777, 0, entry.link]
    with open(entry.fd, "rb") as file:
        if entry.info.st_size > size:
            return [entry.path, "file", mode & 0o777, entry.info.st_size, ""]
        digest = hashlib.sha256()
        left = entry.info.st_size
        while left > 0 and (chunk := file.read(min(left, _CHUNK))):
            digest.update(chunk)
            left -= len(chunk)
        return [entry.path, "file", mode & 0o777, entry.info.st_size, digest.hexdigest()]


def serve(order: dict[str, Any]) -> int:
    """Do one transfer over standard input and output, as the body of a cell. Raises Refused, OSError."""
    out = io.BufferedWriter(io.FileIO(1, "w"), 1 << 18)
    size, files = int(order["size"]), int(order["files"])
    sys.setrecursionlimit(10_000)
    if order["do"] == "put":
        put(io.BufferedReader(io.FileIO(0, "r")), order["at"], size, files)
    elif order["do"] == "get":
        get(out, order["base"], order["paths"], size, files)
    elif order["do"] == "scan":
        scan(out, order["base"], order["paths"], size, files)
    else:
        raise Refused(f"transfer: found {order['do']!r:.40}; allowed: put, get, scan")
    return 0
