"""Objects in a directory. A key is a path below it.

Invariants
- A reader sees a whole object or none: bytes are written below `.tmp/` of the same file system and renamed into place.
- `put_if_absent` links the finished file to its name, which fails if the name is taken: exactly one of many wins.
- A get re-computes xxh3-128 over what it reads. The checksum of the bytes that were put lies with them, in an extended
  attribute of the file: it is there before the file has its name, and goes with it. So `get(head(key))` finds damage too.
  Where it is missing (a file system or a copy without attributes, an object of an older version), `head` computes it.
- After the death of a process at any moment there are whole objects and perhaps a forgotten temporary, which is swept
  a day later. Surviving a power loss is a setting (`fsync`), off by default: it syncs the file and every folder on the way
  that is new.
- Who only looks makes nothing: the directory comes with its first object.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import xxhash

from shared.contracts.run import Ref
from shared.objects import ObjectDamaged, ObjectMissing, keys

CHUNK = 1 << 20
FOLDER_TRIES = 20  # to lose its new folder to somebody's delete so often, a put would have to meet as many of them
CHECKSUM = "user.xxh3-128"
SWEEP_AFTER_S = 24 * 3600.0  # a temporary that nobody has written to for so long belongs to a dead process


class DirectoryObjects:
    def __init__(self, root: Path, *, fsync: bool = False) -> None:
        self.root = root.absolute()
        self._fsync = fsync
        self._temporary = self.root / ".tmp"
        self._sweep()

    def put(self, key: str, data: bytes) -> Ref:
        target = self._path(key)
        with self._written(data) as (temporary, ref):
            self._place(os.replace, temporary, target, key)
        return Ref(key=key, size=ref.size, checksum=ref.checksum)

    def put_file(self, key: str, path: Path) -> Ref:
        target = self._path(key)
        with path.open("rb") as source, self._written(source) as (temporary, ref):
            self._place(os.replace, temporary, target, key)
        return Ref(key=key, size=ref.size, checksum=ref.checksum)

    def put_if_absent(self, key: str, data: bytes) -> Ref | None:
        target = self._path(key)
        with self._written(data) as (temporary, ref):
            try:
                self._place(os.link, temporary, target, key)
            except FileExistsError:
                return None
        return Ref(key=key, size=ref.size, checksum=ref.checksum)

    def get(self, ref: Ref) -> bytes:
        with self._open(ref.key) as file:
            data = file.read()
        _verify(ref, len(data), xxhash.xxh3_128_hexdigest(data))
        return data

    def get_file(self, ref: Ref, path: Path) -> None:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with self._open(ref.key) as source, temporary.open("xb") as sink:
                size, checksum = _copy(source, sink)
            _verify(ref, size, checksum)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def head(self, key: str) -> Ref:
        with self._open(key) as file:
            size, checksum = os.fstat(file.fileno()).st_size, _kept(file)
            if checksum is None:
                size, checksum = _copy(file, None)
        return Ref(key=key, size=size, checksum=checksum)

    def list(self, prefix: str) -> Iterator[str]:
        """Keys that begin with `prefix`, in the order of their characters."""
        folder, _, begin = prefix.rpartition("/")
        if folder:
            keys.check(folder)
        yield from self._walk(self.root / folder, f"{folder}/" if folder else "", begin)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        for key in self.list(prefix):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted since it was listed
                yield key, self._path(key).stat().st_size

    def delete(self, key: str) -> None:
        """Deleting what is not there is no error. Folders that are empty then go too: every checkpoint has one of its own,
        and a listing looks into each."""
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        # The first that is not empty ends it, or one that somebody was faster to remove.
        with contextlib.suppress(OSError):
            for folder in path.parents[: len(key.split("/")) - 1]:
                folder.rmdir()

    def _path(self, key: str) -> Path:
        return self.root / keys.check(key)

    def _open(self, key: str) -> IO[bytes]:
        try:
            return self._path(key).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ObjectMissing(key) from None

    @contextlib.contextmanager
    def _written(self, source: bytes | IO[bytes]) -> Iterator[tuple[Path, Ref]]:
        """A finished temporary with the source's bytes, their size and checksum; removed afterwards unless renamed."""
        if not self._temporary.exists():
            self._make()
        temporary = self._temporary / f"{os.getpid()}-{uuid.uuid4().hex}"
        try:
            with temporary.open("xb") as sink:
                if isinstance(source, bytes):
                    sink.write(source)
                    size, checksum = len(source), xxhash.xxh3_128_hexdigest(source)
                else:
                    size, checksum = _copy(source, sink)
                _keep(sink, checksum)
                if self._fsync:
                    sink.flush()
                    os.fsync(sink.fileno())
            yield temporary, Ref(key="", size=size, checksum=checksum)
        finally:
            temporary.unlink(missing_ok=True)

    def _make(self) -> None:
        new = [folder for folder in (self.root, *self.root.parents) if not folder.exists()] if self._fsync else []
        self._temporary.mkdir(parents=True, exist_ok=True)
        for made in new:
            _sync(made.parent)

    def _place(self, how: Callable[[Path, Path], None], temporary: Path, target: Path, key: str) -> None:
        # Each is an entry of the one above it. A folder that another process makes in this very moment, that one syncs.
        new = [folder for folder in target.parents if not folder.exists()] if self._fsync else []
        try:
            self._named(how, temporary, target)
        except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
            if target.is_file() and isinstance(error, FileExistsError):
                raise
            raise ValueError(f"object key {key!r}: an object cannot lie under the key of another one") from None
        if self._fsync:
            for folder in (target.parent, *(made.parent for made in new)):
                _sync(folder)

    @staticmethod
    def _named(how: Callable[[Path, Path], None], temporary: Path, target: Path) -> None:
        """Gives the temporary its name; makes the folder once more where a delete beside us took it while it was empty."""
        for left in reversed(range(FOLDER_TRIES)):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                return how(temporary, target)
            except (FileNotFoundError, FileExistsError):  # mkdir says the latter, too, of a folder that is gone again
                if not left or target.exists() or any(folder.is_file() for folder in target.parents):
                    raise

    def _walk(self, folder: Path, path: str, begin: str) -> Iterator[str]:
        try:
            with os.scandir(folder) as entries:
                found = sorted((e.name + "/" if e.is_dir() else e.name) for e in entries if e.name != ".tmp")
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in found:
            if not name.startswith(begin):
                continue
            if name.endswith("/"):
                yield from self._walk(folder / name[:-1], path + name, "")
            else:
                yield path + name

    def _sweep(self) -> None:
        for path in self._temporary.glob("*"):  # none where there is no such folder
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - SWEEP_AFTER_S:
                    path.unlink()


def _copy(source: IO[bytes], sink: IO[bytes] | None) -> tuple[int, str]:
    """Streams; returns size and checksum."""
    hasher, size = xxhash.xxh3_128(), 0
    while chunk := source.read(CHUNK):
        hasher.update(chunk)
        size += len(chunk)
        if sink:
            sink.write(chunk)
    return size, hasher.hexdigest()


def _keep(file: IO[bytes], checksum: str) -> None:
    """As well as the system can."""
    with contextlib.suppress(OSError, AttributeError):  # no attributes here, or no room for one; not known to macOS
        os.setxattr(file.fileno(), CHECKSUM, checksum.encode())


def _kept(file: IO[bytes]) -> str | None:
    try:
        return os.getxattr(file.fileno(), CHECKSUM).decode("ascii", "replace")
    except (OSError, AttributeError):
        return None


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _verify(ref: Ref, size: int, checksum: str) -> None:
    if size != ref.size:
        raise ObjectDamaged(f"{ref.key}: {size} bytes, expected {ref.size}")
    if checksum != ref.checksum:
        raise ObjectDamaged(f"{ref.key}: checksum {checksum}, expected {ref.checksum}")
