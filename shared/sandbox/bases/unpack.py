"""Unpacks the archive of a base into a folder. The archive may be hostile.

Invariants:
- Nothing is written outside the folder: each path is opened part by part from the folder's descriptor, and no link is followed.
- Nothing that exists is opened for writing: every file is new.
- No device, socket, pipe, sparse file or setuid bit comes out of an archive. Modes are 755 and 644.
- An archive over its bounds is refused before the byte or the file that passes them is written.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.archives import ArchiveError, Member, Stream, require_end, wrong_path, wrong_target

MAX_BYTES = 16 << 30  # of all files of a base
MAX_FILES = 1_000_000  # files, folders and links of a base
_HEADERS = 4096  # bytes of an archive for each member: headers and padding
_LATEST = 1 << 33  # seconds since the epoch; some file systems store no later time
_CHUNK = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Tally:
    """`size`: bytes of regular files, each hard-linked one once. `files`: files, folders and links. `digest`: sha256 of the tar,
    as it is before compression."""

    size: int
    files: int
    digest: str


def unpack(pieces: Iterator[bytes], into: Path, *, size: int = MAX_BYTES, files: int = MAX_FILES) -> Tally:
    """Write a tar's members into an empty folder. `size`, `files`: bounds, as in `Tally`. Raises ArchiveError, and OSError where
    the disk fails; then a part is written."""
    size, files = min(size, MAX_BYTES), min(files, MAX_FILES)
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for piece in pieces:
            digest.update(piece)
            yield piece

    most = size + _HEADERS * (files + 16)
    stream = Stream(hashed(), most, f"the archive unpacks to more than {most} bytes")
    with _Writer(into, size, files) as writer:
        try:
            # errorlevel 2: what cannot be read is an error, never a member that is left out.
            with tarfile.open(fileobj=stream, mode="r|", errorlevel=2, tarinfo=Member) as tar:  # type: ignore[call-overload]
                for member in tar:
                    writer.add(tar, member)
                    tar.members = []  # it keeps each, and needs none in this mode
                require_end(tar, stream)
        except ArchiveError:
            raise
        except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
            raise ArchiveError(f"no tar archive, or damaged: {error}") from None
        return Tally(writer.size, writer.files, digest.hexdigest())


class _Writer:
    def __init__(self, into: Path, most_bytes: int, most_files: int) -> None:
        self._most_bytes, self._most_files = most_bytes, most_files
        self._open: list[tuple[str, int]] = [("", os.open(into, _FOLDER))]  # the folders on the way to the last path
        self._seen: set[str] = set()  # paths that have been members
        self._regular: set[str] = set()
        self.size = self.files = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.pop()[1])

    def add(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write one member. Raises ArchiveError, OSError."""
        path = member.name.removeprefix("./").rstrip("/")
        if path in ("", ".") and member.isdir():
            return
        try:
            self._add(tar, member, path)
        except ArchiveError as error:
            raise ArchiveError(f"{path!r:.200}: {error}") from None
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR):
                raise ArchiveError(f"{path!r:.200}: cannot be written: {error.strerror}") from None
            raise

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        if wrong := wrong_path(path):
            raise ArchiveError(wrong)
        if path in self._seen:
            raise ArchiveError("stands in the archive twice; allowed: once")
        self._seen.add(path)
        *above, name = path.split("/")
        if member.isdir():
            self._folder([*above, name])
            return
        folder = self._folder(above)
        self._count()
        if member.issym():
            if wrong := wrong_target(member.linkname):
                raise ArchiveError(wrong)
            os.symlink(member.linkname, name, dir_fd=folder)
        elif member.islnk():
            self._hard_link(member.linkname, folder, above, name)
        elif member.isreg() and not member.issparse():
            self._file(tar, member, folder, name)
        else:
            raise ArchiveError("is a device, a pipe or a sparse file; allowed: files, folders and links")
        if member.isreg() or member.islnk():
            self._regular.add(path)

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, folder: int, name: str) -> None:
        self.size += member.size
        if self.size > self._most_bytes:
            raise ArchiveError(f"the files before it and it have more than {self._most_bytes} bytes")
        source, left = tar.extractfile(member), member.size
        assert source is not None
        descriptor = os.open(name, _NEW, 0o600, dir_fd=folder)
        with open(descriptor, "wb", buffering=0) as sink:
            while data := source.read(min(left, _CHUNK)):
                left -= len(data)
                view = memoryview(data)
                while view:
                    view = view[sink.write(view) or 0 :]
            if left:
                raise ArchiveError("the archive is cut short")
            os.fchmod(descriptor, 0o755 if member.mode & 0o111 else 0o644)
            time = min(max(int(member.mtime), 0), _LATEST)
            os.utime(descriptor, (time, time))

    def _hard_link(self, original: str, folder: int, above: list[str], name: str) -> None:
        original = original.removeprefix("./")
        if original not in self._regular:
            raise ArchiveError(f"is a hard link to {original!r:.200}; allowed: to a file earlier in the archive")
        *there, at = original.split("/")
        here = os.dup(folder)  # looking for the other folder closes this one
        try:
            os.link(at, name, src_dir_fd=self._folder(there), dst_dir_fd=here, follow_symlinks=False)
        finally:
            os.close(here)

    def _folder(self, parts: list[str]) -> int:
        """Return the descriptor of a folder; make it, and those above it, where they are missing. Raises ArchiveError."""
        common = 0
        while common < min(len(parts), len(self._open) - 1) and self._open[common + 1][0] == parts[common]:
            common += 1
        while len(self._open) > common + 1:
            os.close(self._open.pop()[1])
        for part in parts[common:]:
            self._open.append((part, self._enter(part, self._open[-1][1])))
        return self._open[-1][1]

    def _enter(self, name: str, above: int) -> int:
        try:
            return os.open(name, _FOLDER, dir_fd=above)
        except FileNotFoundError:
            self._count()
            os.mkdir(name, 0o700, dir_fd=above)
            descriptor = os.open(name, _FOLDER, dir_fd=above)
            os.fchmod(descriptor, 0o755)
            return descriptor
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise ArchiveError(f"{name!r:.200} above it is a file or a link; allowed: a folder") from None
            raise

    def _count(self) -> None:
        self.files += 1
        if self.files > self._most_files:
            raise ArchiveError(f"is one more than {self._most_files} files, folders and links")
