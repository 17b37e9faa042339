"""Reads untrusted tar archives piece by piece, and says which paths an archive may have.

Invariants of what is read through here:
- No piece, header or window is larger than its bound: an archive that unfolds is refused before it has.
- An archive has an end of its own and nothing behind it: one that is cut short or damaged is refused.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator

import zstandard

MAX_PART, MAX_PATH = 255, 3072  # bytes; Linux takes 255 and 4096, and there is a folder above
MAX_TARGET = 4095  # bytes of a link's target, as in Linux
MAX_DEPTH = 200  # parts of a path; the standard library removes and copies folders by recursion, 1,000 levels at most
END = b"\0" * 1024  # of a tar
_WINDOW = 1 << 27  # bytes that a decompressor may be made to reserve
_PIECE = 1024  # bytes decompressed at once: a bomb is noticed before it has unfolded
_HEADER = 1 << 16  # bytes of one extended header; a name of 4096 bytes and a link of as many fit


class ArchiveError(ValueError):
    """The archive cannot be taken; the text says what was found and what is allowed."""


def wrong_path(path: str) -> str | None:
    """Return why nothing below a folder can be written at this path, or None if it can. Control characters are allowed here: a
    program may give its files any name."""
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "is no UTF-8"
    parts = path.split("/")
    if path.startswith("/"):
        return "is absolute; allowed: relative paths"
    if any(part in ("", ".", "..") for part in parts):
        return "has a part that is empty, '.' or '..'; allowed: plain names joined by '/'"
    if "\0" in path:
        return "has a NUL character; allowed: none"
    if size > MAX_PATH or any(len(part.encode()) > MAX_PART for part in parts):
        return f"is too long; allowed: {MAX_PART} bytes in a name, {MAX_PATH} in all"
    if len(parts) > MAX_DEPTH:
        return f"is too deep: found {len(parts)} parts; allowed: at most {MAX_DEPTH}"
    return None


def wrong_target(target: str) -> str | None:
    """Return why no symbolic link can lead to this target, or None if one can. It may lead out: who unpacks follows none."""
    try:
        size = len(target.encode())
    except UnicodeEncodeError:
        return "links to a path that is no UTF-8"
    if not 0 < size <= MAX_TARGET or "\0" in target:
        return f"links to a path of {size} bytes; allowed: 1 to {MAX_TARGET}, without NUL"
    return None


def zstd_pieces(packed: Iterable[bytes]) -> Iterator[bytes]:
    """Decompress one zstd frame. Raises ArchiveError for damage, and for bytes missing at its end or behind it."""
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(read_across_frames=False)
    size = 0
    try:
        for data in packed:
            size += len(data)
            for at in range(0, len(data), _PIECE):
                if reader.eof:
                    raise ArchiveError("found bytes behind the end of the archive")
                if part := reader.decompress(data[at : at + _PIECE]):
                    yield part
    except zstandard.ZstdError as error:
        raise ArchiveError(f"no zstd data, or damaged: {error}") from None
    if not reader.eof:
        raise ArchiveError(f"the archive is cut short after {size} bytes")


class Stream:
    """A file that tarfile can read, of pieces. Gives `most` bytes and raises ArchiveError for one more."""

    def __init__(self, pieces: Iterator[bytes], most: int, too_much: str) -> None:
        self._pieces, self._most, self._too_much = pieces, most, too_much
        self._rest = memoryview(b"")
        self._given = 0
        self.tail = b""  # the last bytes given

    def read(self, size: int) -> bytes:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        part, self._rest = bytes(self._rest[:size]), self._rest[size:]
        self._given += len(part)
        if self._given > self._most:
            raise ArchiveError(self._too_much)
        self.tail = part[-len(END) :] if len(part) >= len(END) else (self.tail + part)[-len(END) :]
        return part


class Member(tarfile.TarInfo):
    """A member whose headers are no larger than their bound, and which is no sparse file: its map would be read as a whole."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        bounded = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in (*bounded, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK) and self.size > _HEADER:
            raise ArchiveError(f"found a header of {self.size} bytes; allowed: at most {_HEADER}")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise ArchiveError(f"{self.name!r:.200}: is a sparse file; allowed: plain ones")
        return super()._proc_member(tar)  # type: ignore[misc]

    def _no_sparse(self, *_: object) -> None:
        raise ArchiveError(f"{self.name!r:.200}: is a sparse file; allowed: plain ones")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _no_sparse


def require_end(tar: tarfile.TarFile, stream: Stream) -> None:
    """Read what is left behind the last member. Raises ArchiveError unless it is the end of a tar."""
    while rest := tar.fileobj.read(1 << 16):
        if rest.strip(b"\0"):  # tarfile takes a damaged header for the end
            raise ArchiveError("the archive is damaged: found data behind its end")
    if stream.tail != END:
        raise ArchiveError("the archive is cut short: found no end")
