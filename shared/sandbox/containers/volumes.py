"""Folders of this machine as read-only volumes of the engine, which may run on another machine.

A volume is filled through the engine's API, once per content, and shared by all sandboxes that need it.

Invariants:
- A volume is used only when its last file, the mark, is there. A half-filled one belongs to a process that still fills it,
  or that died; the reaper removes it with its deadline.
- A complete volume is never written to again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from shared.sandbox.containers import labels
from shared.sandbox.containers.engine import Engine, in_use, missing, spoken_for

_MARK = ".etude-complete"
_PLACE = "/etude-volume"
_making = threading.Lock()  # within one process; between processes a second copy does no harm
_known: dict[tuple[int, str], str] = {}
_digests: dict[bytes, str] = {}
_DIGESTS = 4096
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, link or folder of a tree. `source`: its bytes, or where they are; None: a folder, or a link to `target`."""

    path: str
    mode: int
    source: Path | bytes | None = None
    target: str = ""


def entries(folder: Path, wanted: Callable[[str], bool] = lambda path: True) -> list[Entry]:
    """Return the contents of a folder, parents first. Follows no link. `wanted` is asked for every path inside; an unwanted
    folder is left out whole. Raises ValueError for devices, sockets and pipes."""
    found: list[Entry] = []
    for where, folders, files in os.walk(folder):
        prefix = where[len(str(folder)) + 1 :] + "/" if where != str(folder) else ""
        folders[:] = sorted(name for name in folders if wanted(prefix + name))
        for name in sorted(folders + [name for name in files if wanted(prefix + name)]):
            path = Path(where, name)
            inside, info = prefix + name, path.lstat()
            mode = stat.S_IMODE(info.st_mode)
            if stat.S_ISLNK(info.st_mode):
                found.append(Entry(inside, 0o777, target=os.readlink(path)))
            elif stat.S_ISDIR(info.st_mode):
                found.append(Entry(inside, mode))
            elif stat.S_ISREG(info.st_mode):
                found.append(Entry(inside, mode, source=path))
            else:
                raise ValueError(
                    f"{path}: found {stat.filemode(info.st_mode)}; allowed: files, folders and links; remove it"
                )
    return found


def digest(found: Iterable[Entry], *more: str) -> str:
    """Return a name for the contents, which `more` distinguishes further."""
    total = hashlib.blake2b("\0".join(more).encode(), digest_size=12)
    for entry in found:
        total.update(
            f"\0{entry.path}\0{entry.mode:o}\0{entry.target}\0{_size(entry)}\0".encode("utf-8", "surrogateescape")
        )
        if entry.source is not None:
            with _opened(entry.source) as file:
                while chunk := file.read(_CHUNK):
                    total.update(chunk)
    return total.hexdigest()


def archive(found: Iterable[Entry], out: IO[bytes], *, uid: int = 0, mark: bool = False) -> None:
    """Write a tar archive of the entries, all of them owned by `uid`. `mark`: with the mark as the last file."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for entry in found:
            head = tarfile.TarInfo(entry.path)
            head.uid = head.gid = uid
            head.mode = entry.mode
            if entry.source is not None:
                with _opened(entry.source) as file:
                    if isinstance(entry.source, bytes):
                        head.size = len(entry.source)
                    else:
                        info = os.fstat(file.fileno())
                        head.size, head.mtime = info.st_size, info.st_mtime
                    tar.addfile(head, file)
                continue
            head.type = tarfile.SYMTYPE if entry.target else tarfile.DIRTYPE
            head.linkname = entry.target
            tar.addfile(head)
        if mark:
            tar.addfile(tarfile.TarInfo(_MARK), io.BytesIO())


def content(found: Sequence[Entry]) -> str:
    """Return the digest of entries. Files that nobody has touched since the last time are not read again."""
    seen = hashlib.blake2b()
    for entry in found:
        seen.update(f"\0{entry.path}\0{entry.mode:o}\0{entry.target}\0".encode("utf-8", "surrogateescape"))
        if isinstance(entry.source, Path):
            info = entry.source.stat()
            seen.update(f"{entry.source}\0{info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}".encode())
        elif entry.source is not None:
            seen.update(entry.source)
    key = seen.digest()
    if key not in _digests:
        if len(_digests) >= _DIGESTS:
            _digests.clear()
        _digests[key] = digest(found)
    return _digests[key]


def _size(entry: Entry) -> int:
    if entry.source is None:
        return -1
    return len(entry.source) if isinstance(entry.source, bytes) else entry.source.stat().st_size


def _opened(source: Path | bytes) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")


def volume(engine: Engine, found: Sequence[Entry], image: str) -> str:
    """Return the name of a complete volume with these contents. `image`: any image of the engine; nothing of it runs.

    Raises SandboxUnavailable, OSError.
    """
    key = content(found)
    with _making:
        known = _known.get((id(engine.client), key))
        if known and _exists(engine, known):
            return known
        with spoken_for("a volume for the sandbox's files"):
            made = _complete(engine, key, image) or _filled(engine, key, found, image)
        _known[id(engine.client), key] = made
        return made


def _exists(engine: Engine, name: str) -> bool:
    from docker.errors import NotFound

    with spoken_for("a volume for the sandbox's files"):
        try:
            engine.api.inspect_volume(name)
        except NotFound:
            return False
    return True


def _complete(engine: Engine, key: str, image: str) -> str | None:
    """Return the first complete volume of this digest that is not about to expire, or None."""
    from docker.errors import APIError

    listed = engine.api.volumes(filters={"label": f"{labels.DIGEST}={key}"})["Volumes"] or []
    for name in sorted(found["Name"] for found in listed):
        with contextlib.suppress(APIError):  # removed meanwhile
            helper = create_helper(engine, image, name)
            try:
                engine.api.get_archive(helper, f"{_PLACE}/{_MARK}")
                return name
            except APIError as error:
                if not missing(error):
                    raise
            finally:
                remove(engine, helper)
    return None


def _filled(engine: Engine, key: str, found: Sequence[Entry], image: str) -> str:
    name = labels.name("files")
    engine.api.create_volume(name, labels=labels.labels("files", seconds=labels.CACHE_S, digest=key))
    helper = ""
    try:
        helper = create_helper(engine, image, name)
        with tempfile.TemporaryFile() as spool:
            archive(found, spool, mark=True)
            spool.seek(0)
            engine.api.put_archive(helper, _PLACE, spool)
    except BaseException:
        if helper:
            remove(engine, helper)
        with contextlib.suppress(Exception):
            engine.api.remove_volume(name, force=True)
        raise
    remove(engine, helper)
    return name


def create_helper(engine: Engine, image: str, name: str = "") -> str:
    """Create a container that never starts: the engine's way into an image, and into a volume of this name."""
    from docker.types import Mount

    mounts = [Mount(_PLACE, name, type="volume", no_copy=True)] if name else []
    config = engine.api.create_host_config(mounts=mounts, network_mode="none")
    marks = labels.labels("helper", seconds=600.0)
    made = engine.api.create_container(
        image, ["/bin/true"], name=labels.name("helper"), host_config=config, labels=marks
    )
    return str(made["Id"])


def remove(engine: Engine, container: str) -> None:
    """Remove a container, running or not, unless it is gone or going."""
    from docker.errors import APIError

    try:
        engine.api.remove_container(container, force=True, v=True)
    except APIError as error:
        if not missing(error) and not in_use(error):
            raise
